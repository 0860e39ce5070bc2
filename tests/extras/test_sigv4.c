/* test_sigv4.c - signatures of extras/mlfab_sigv4.c against the ones that AWS has published.
 *
 * Sources: (1) Amazon S3 API Reference, "Signature Calculations for the Authorization Header: Transferring Payload in
 * a Single Chunk", its four examples. (2) AWS's Signature Version 4 test suite, as in github.com/awslabs/aws-c-auth,
 * tests/aws-signing-test-suite/v4 (header-signed-request.txt of each case). Cases about the normalization of paths and
 * the second encoding of theirs are left out: S3 does neither. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1
#endif

#include "../testing.h"

#include "../../extras/mlfab_sigv4.h"

#define NOTHING "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"

typedef mlfab__sigv4_pair pair;

/* NULL: GET, "/" and NOTHING. */
typedef struct vector {
  const char *name, *method, *path;
  pair query[4], headers[6]; /* besides Host and X-Amz-Date; ended by NULL */
  const char *payload, *names, *signature;
} vector;

static const vector s3[] = {
    {.name = "GET Object",
     .path = "/test.txt",
     .headers = {{"Range", "bytes=0-9"}, {"x-amz-content-sha256", NOTHING}},
     .names = "host;range;x-amz-content-sha256;x-amz-date",
     .signature = "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41"},
    {.name = "PUT Object",
     .method = "PUT",
     .path = "/test%24file.text",
     .headers = {{"Date", "Fri, 24 May 2013 00:00:00 GMT"},
                 {"x-amz-storage-class", "REDUCED_REDUNDANCY"},
                 {"x-amz-content-sha256",
                  "44ce7dd67c959e0d3524ffac1771dfbba87d2b6b4b4e99e42034a8b803f8b072"}},
     .payload = "44ce7dd67c959e0d3524ffac1771dfbba87d2b6b4b4e99e42034a8b803f8b072",
     .names = "date;host;x-amz-content-sha256;x-amz-date;x-amz-storage-class",
     .signature = "98ad721746da40c64f1a55b78f14c238d841ea1380cd77a1b5971af0ece108bd"},
    {.name = "GET Bucket Lifecycle",
     .query = {{"lifecycle", ""}},
     .headers = {{"x-amz-content-sha256", NOTHING}},
     .names = "host;x-amz-content-sha256;x-amz-date",
     .signature = "fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543"},
    {.name = "GET Bucket (List Objects)",
     .query = {{"prefix", "J"}, {"max-keys", "2"}},
     .headers = {{"x-amz-content-sha256", NOTHING}},
     .names = "host;x-amz-content-sha256;x-amz-date",
     .signature = "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7"},
};

#define UNRESERVED "-._~0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"

static const vector suite[] = {
    {.name = "get-vanilla",
     .names = "host;x-amz-date",
     .signature = "5fa00fa31553b73ebf1942676e86291e8372ff2a2260956d9b8aae1d763fbf31"},
    {.name = "get-header-key-duplicate",
     .headers = {{"My-Header1", "value2"}, {"My-Header1", "value2"}, {"My-Header1", "value1"}},
     .names = "host;my-header1;x-amz-date",
     .signature = "c9d5ea9f3f72853aea855b47ea873832890dbdd183b4468f858259531a5138ea"},
    {.name = "get-header-value-order",
     .headers = {{"My-Header1", "value4"},
                 {"My-Header1", "value1"},
                 {"My-Header1", "value3"},
                 {"My-Header1", "value2"}},
     .names = "host;my-header1;x-amz-date",
     .signature = "08c7e5a9acfcfeb3ab6b2185e75ce8b1deb5e634ec47601a50643f830c755c01"},
    {.name = "get-header-value-trim",
     .headers = {{"My-Header1", " value1"}, {"My-Header2", " \"a   b   c\""}},
     .names = "host;my-header1;my-header2;x-amz-date",
     .signature = "acc3ed3afb60bb290fc8d2dd0098b9911fcaa05412b367055dee359757a9c736"},
    {.name = "get-vanilla-query-order-key-case",
     .query = {{"Param2", "value2"}, {"Param1", "value1"}},
     .names = "host;x-amz-date",
     .signature = "b97d918cfa904a5beff61c982a1b6f458b799221646efd99d3219ec94cdf2500"},
    {.name = "get-vanilla-query-order-encoded",
     .query = {{"Param-3", "Value3"}, {"Param", "Value2"}, {"\xe1\x88\xb4", "Value1"}},
     .names = "host;x-amz-date",
     .signature = "371d3713e185cc334048618a97f809c9ffe339c62934c032af5a0e595648fcac"},
    {.name = "get-vanilla-query-unreserved",
     .query = {{UNRESERVED, UNRESERVED}},
     .names = "host;x-amz-date",
     .signature = "9c3e54bfcdf0b19771a7f523ee5669cdf59bc7cc0884027167c21bb143a40197"},
    {.name = "get-vanilla-utf8-query",
     .query = {{"\xe1\x88\xb4", "bar"}},
     .names = "host;x-amz-date",
     .signature = "2cdec8eed098649ff3a119c94853b13c643bcf08f8b0a1d91e12c9027818dd04"},
    {.name = "get-vanilla-with-session-token",
     .headers = {{"X-Amz-Security-Token",
                  "6e86291e8372ff2a2260956d9b8aae1d763fbf315fa00fa31553b73ebf194267"}},
     .names = "host;x-amz-date;x-amz-security-token",
     .signature = "07ec1639c89043aa0e3e2de82b96708f198cceab042d4a97044c66dd9f74e7f8"},
    {.name = "get-slash-dot-slash-unnormalized",
     .path = "/./",
     .names = "host;x-amz-date",
     .signature = "68714168e6557f8f2de0ef956fc24dc2593a4bd2961f8df51898d8a134695145"},
    {.name = "get-slashes-unnormalized",
     .path = "//example//",
     .names = "host;x-amz-date",
     .signature = "87cca117541a147f6df867677d98a7d80dff226d2bfca9e4ffa899665623c7e5"},
    {.name = "post-x-www-form-urlencoded",
     .method = "POST",
     .headers = {{"Content-Type", "application/x-www-form-urlencoded"},
                 {"Content-Length", "13"},
                 {"x-amz-content-sha256",
                  "9095672bbd1f56dfc5b65f3e153adc8731a4a654192329106275f4c7b24d0b6e"}},
     .payload = "9095672bbd1f56dfc5b65f3e153adc8731a4a654192329106275f4c7b24d0b6e",
     .names = "content-length;content-type;host;x-amz-content-sha256;x-amz-date",
     .signature = "d3875051da38690788ef43de4db0d8f280229d82040bfac253562e56c3f20e0b"},
};

/* Signs a vector, its headers and query turned round when `turned`. */
static void check(const vector *v, const pair *host, const char *date, const char *service,
                  const char *key, const char *secret, int turned) {
  pair query[4], headers[8];
  char got[MLFAB__SIGV4_AUTH], want[MLFAB__SIGV4_AUTH];
  mlfab__sigv4_request r = {.method = v->method ? v->method : "GET",
                            .path = v->path ? v->path : "/",
                            .query = query,
                            .headers = headers,
                            .payload = v->payload ? v->payload : NOTHING,
                            .date = date,
                            .region = "us-east-1",
                            .service = service,
                            .access_key = key,
                            .secret_key = secret};
  while (r.nquery < 4 && v->query[r.nquery].name) r.nquery++;
  while (r.nheaders < 6 && v->headers[r.nheaders].name) r.nheaders++;
  for (uint32_t i = 0; i < r.nquery; i++) query[i] = v->query[turned ? r.nquery - 1 - i : i];
  for (uint32_t i = 0; i < r.nheaders; i++) headers[i + (turned ? 0 : 2)] = v->headers[i];
  headers[turned ? r.nheaders : 0] = *host;
  headers[turned ? r.nheaders + 1 : 1] = (pair){"X-Amz-Date", date};
  r.nheaders += 2;
  assert_int_equal(mlfab__sigv4_sign(&r, got, sizeof got), 0);
  snprintf(want, sizeof want,
           "AWS4-HMAC-SHA256 Credential=%s/%.8s/us-east-1/%s/aws4_request, SignedHeaders=%s, "
           "Signature=%s",
           key, date, service, v->names, v->signature);
  if (strcmp(got, want) != 0) fail_msg("%s:\n%s\nnot\n%s", v->name, got, want);
  for (size_t room = 0; room < strlen(want) + 1; room += 37)
    assert_int_equal(mlfab__sigv4_sign(&r, got, room), -1);
}

TEST(test_published) {
  const pair bucket = {"Host", "examplebucket.s3.amazonaws.com"};
  const pair host = {"Host", "example.amazonaws.com"};
  for (int turned = 0; turned < 2; turned++) {
    for (size_t i = 0; i < sizeof s3 / sizeof *s3; i++)
      check(&s3[i], &bucket, "20130524T000000Z", "s3", "AKIAIOSFODNN7EXAMPLE",
            "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", turned);
    for (size_t i = 0; i < sizeof suite / sizeof *suite; i++)
      check(&suite[i], &host, "20150830T123600Z", "service", "AKIDEXAMPLE",
            "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY", turned);
  }
}

TEST(test_encoding) {
  char text[64];
  assert_int_equal(mlfab__sigv4_path("/a b/+\xc3\xa9/%41~.txt", text, sizeof text), 0);
  assert_string_equal(text, "/a%20b/%2B%C3%A9/%2541~.txt");
  assert_int_equal(mlfab__sigv4_path("/a b", text, 7), 0);
  assert_int_equal(mlfab__sigv4_path("/a b", text, 6), -1);
  assert_int_equal(mlfab__sigv4_path("", text, 0), -1);
  const pair query[] = {{"z", "1/2"}, {"a-b", ""}, {"a", "y"}, {"a", " "}, {"a b", "c"}};
  assert_int_equal(mlfab__sigv4_query(query, 5, text, sizeof text), 0);
  assert_string_equal(text, "a=%20&a=y&a%20b=c&a-b=&z=1%2F2");
  size_t whole = strlen(text);
  for (size_t room = 0; room <= whole; room++)
    assert_int_equal(mlfab__sigv4_query(query, 5, text, room), -1);
  assert_int_equal(mlfab__sigv4_query(query, 0, text, sizeof text), 0);
  assert_string_equal(text, "");
  assert_int_equal(mlfab__sigv4_query(query, MLFAB__SIGV4_PAIRS + 1, text, sizeof text), -1);
}

/* Queries of random pairs: sorting them after the encoding gives the same. */
static int order_of_texts(const void *a, const void *b) {
  return strcmp(*(const char *const *)a, *(const char *const *)b);
}

TEST(test_random_order) {
  srand(7);
  for (int round = 0; round < 5000; round++) {
    char names[MLFAB__SIGV4_PAIRS][4], text[512], want[512] = "", each[MLFAB__SIGV4_PAIRS][32];
    const char *order[MLFAB__SIGV4_PAIRS];
    pair query[MLFAB__SIGV4_PAIRS];
    uint32_t n = (uint32_t)rand() % MLFAB__SIGV4_PAIRS;
    for (uint32_t i = 0; i < n; i++) {
      int length = rand() % 4;
      for (int k = 0; k < length; k++) names[i][k] = "a-.~ %=&\xc3Z0_"[rand() % 12];
      names[i][length] = 0;
      query[i] = (pair){names[i], ""};
      assert_int_equal(mlfab__sigv4_query(&query[i], 1, each[i], sizeof each[i]), 0);
      each[i][strlen(each[i]) - 1] = 0; /* the "=", which is no part of the order */
      order[i] = each[i];
    }
    qsort(order, n, sizeof *order, order_of_texts);
    for (uint32_t i = 0; i < n; i++)
      snprintf(want + strlen(want), sizeof want - strlen(want), "%s%s=", i ? "&" : "", order[i]);
    assert_int_equal(mlfab__sigv4_query(query, n, text, sizeof text), 0);
    assert_string_equal(text, want);
  }
}

TESTS(NULL, NULL)
