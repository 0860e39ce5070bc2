/* test_tls.c - what extras/mlfab_tls.c refuses, and what its traffic tells: keys, versions, strangers, changed and repeated
 * bytes. The conformance suite (test_tls_conform.c) has the rest. */
#include "../conform/conform.h"

#include "../../extras/mlfab_tls.h"
#include "tls_client.h"
#include "../testing.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <openssl/crypto.h>
#include <openssl/x509.h>
#include <signal.h>
#include <sys/wait.h>

#define KEY "the-key-of-this-test-which-is-long"
#define OTHER "another-key-which-is-as-long-as-that"
#define SECRET "these weights are nobody's business, and neither are those of others"

enum { WAIT_MS = 10000, RELAY_MOST = 1 << 17 };

static int64_t openssl_bytes; /* that OpenSSL has allocated */

static void *counted_allocate(size_t bytes, const char *file, int line) {
  (void)file, (void)line;
  uint64_t *memory = malloc(bytes + 16);
  if (!memory) return NULL;
  *memory = bytes;
  __atomic_fetch_add(&openssl_bytes, (int64_t)bytes, __ATOMIC_RELAXED);
  return memory + 2;
}

static void counted_free(void *memory, const char *file, int line) {
  (void)file, (void)line;
  if (!memory) return;
  uint64_t *begin = (uint64_t *)memory - 2;
  __atomic_fetch_sub(&openssl_bytes, (int64_t)*begin, __ATOMIC_RELAXED);
  free(begin);
}

static void *counted_change(void *memory, size_t bytes, const char *file, int line) {
  void *changed = counted_allocate(bytes, file, line);
  if (memory && changed) {
    size_t old = (size_t)((uint64_t *)memory)[-2];
    memcpy(changed, memory, old < bytes ? old : bytes);
  }
  if (changed) counted_free(memory, file, line);
  return changed;
}

/* --- ends --------------------------------------------------------------------------------------- */

typedef struct end {
  const mlfab_transport *table;
  void *self;
  char address[256];
  mlfab_env env;
  mlfab_error error;
  int64_t bytes;
  uint32_t ups, downs, fails, refused, frames, link;
  uint32_t counted; /* what a node counts as refused */
  int32_t code;     /* of the last DOWN or REFUSED */
  char text[300];   /* its text */
} end;

static void *end_allocate(void *user, size_t bytes) {
  ((end *)user)->bytes += (int64_t)bytes;
  return malloc(bytes);
}

static void end_release(void *user, void *memory, size_t bytes) {
  ((end *)user)->bytes -= (int64_t)bytes;
  free(memory);
}

static int end_try(end *e, const mlfab_transport *table, const char *key, const char *listen) {
  memset(e, 0, sizeof *e);
  e->table = table;
  e->env = (mlfab_env){.size = sizeof e->env,
                       .log_level = MLFAB_LOG_ERROR,
                       .user = e,
                       .allocate = end_allocate,
                       .release = end_release,
                       .clock = conform_now,
                       .log = conform_log};
  mlfab_transport_options options = {.size = sizeof options,
                                     .keyed = 1,
                                     .listen = listen,
                                     .ifname = "",
                                     .job = "test",
                                     .key = key,
                                     .env = &e->env,
                                     .error = &e->error};
  return table->open(&options, &e->self, e->address);
}

static void end_open(end *e, const char *key) {
  assert_int_equal(end_try(e, mlfab_transport_tls(), key, ""), 0);
}

static void end_close(end *e) {
  if (e->self) e->table->close(e->self);
  e->self = NULL;
  assert_int_equal(e->bytes, 0);
}

static end a, b; /* of the test that runs */

static int two_ends(void **state) {
  (void)state;
  end_open(&a, KEY);
  end_open(&b, KEY);
  return 0;
}

static int one_end(void **state) {
  (void)state;
  end_open(&a, KEY);
  return 0;
}

static int close_ends(void **state) {
  (void)state;
  end_close(&a);
  end_close(&b);
  return 0;
}

static void end_poll(end *e) {
  mlfab_io_event event;
  while (e->table->poll(e->self, &event)) {
    if (event.kind == MLFAB_IO_UP) e->ups++, e->link = event.link;
    if (event.kind == MLFAB_IO_DOWN && event.link) e->downs++;
    if (event.kind == MLFAB_IO_DOWN && !event.link) e->fails++;
    if (event.kind == MLFAB_IO_REFUSED) e->refused++;
    e->counted += event.kind == MLFAB_IO_REFUSED || event.code == MLFAB_ERR_CRC;
    if (event.code) {
      e->code = event.code;
      snprintf(e->text, sizeof e->text, "%s", event.text ? event.text : "");
    }
    if (event.kind == MLFAB_IO_FRAME) {
      e->frames++; /* only what was sent arrives */
      assert_int_equal(event.bulk_bytes, sizeof SECRET);
      assert_memory_equal(event.bulk, SECRET, sizeof SECRET);
    }
    e->table->release(e->self, &event);
  }
}

#define UNTIL(a, b, condition)                                                   \
  do {                                                                           \
    uint64_t until_begin = conform_now(NULL);                                    \
    while (!(condition)) {                                                       \
      if (conform_now(NULL) - until_begin > WAIT_MS * 1000000ull)                \
        fail_msg("waited for %s: '%s', '%s'", #condition, (a)->text, (b)->text); \
      end_poll(a);                                                               \
      end_poll(b);                                                               \
      usleep(100);                                                               \
    }                                                                            \
  } while (0)

static void end_call(end *e, const char *address) {
  assert_int_equal(e->table->connect(e->self, address, 1), 0);
}

/* A frame with SECRET as its bulk, unless the link has gone. */
static void end_send(end *e) {
  uint64_t head[8 + 2] = {0};
  conform_seal((uint8_t *)head, 16, (const uint8_t *)SECRET, sizeof SECRET, 0);
  int code = e->table->send(e->self, e->link, head, sizeof head, SECRET, sizeof SECRET, 0);
  assert_true(code == 0 || code == MLFAB_ERR_PEER_CLOSED);
  e->table->flush(e->self);
}

static uint16_t port_of(const end *e) {
  return (uint16_t)strtoul(strrchr(e->address, ':') + 1, NULL, 10);
}

static int wire(uint16_t port) {
  struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(port)};
  to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), one = 1;
  assert_true(fd >= 0);
  assert_int_equal(connect(fd, (const struct sockaddr *)(const void *)&to, sizeof to), 0);
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  return fd;
}

/* --- keys ------------------------------------------------------------------------------------- */

TEST(test_keys_at_open) {
  static const char *const bad[] = {"", "short", "0123456789abcdef,short", KEY "," KEY "," KEY,
                                    KEY ","};
  end e;
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
    assert_int_equal(end_try(&e, mlfab_transport_tls(), bad[i], ""), MLFAB_ERR_CONFIG);
    assert_non_null(strstr(e.error.text, "key"));
    assert_int_equal(e.bytes, 0);
  }
  assert_int_equal(end_try(&e, mlfab_transport_tls(), KEY, "tls:nonsense"), MLFAB_ERR_ADDRESS);
  assert_int_equal(end_try(&e, mlfab_transport_tls(), KEY, "unix:@x"), MLFAB_ERR_ADDRESS);
  assert_int_equal(e.bytes, 0);
  end_open(&e, KEY);
  assert_true(e.table->reach(e.self, "tls:host:1") && e.table->reach(e.self, "tcp:host:1"));
  assert_false(e.table->reach(e.self, "unix:@x") || e.table->reach(e.self, "shm:x"));
  assert_false(mlfab_transport_tcp()->reach(e.self, "sim:1"));
  end_close(&e);
}

TEST_WITH(test_frames, two_ends, close_ends) {
  end_call(&a, b.address);
  UNTIL(&a, &b, a.ups == 1);
  end_send(&a);
  UNTIL(&a, &b, b.frames == 1);
  end_send(&b);
  UNTIL(&a, &b, a.frames == 1);
  end_close(&a);
  UNTIL(&b, &b, b.downs == 1);
  assert_int_equal(b.code, MLFAB_ERR_PEER_CLOSED);
}

/* Whoever has a key of the called node's gets through. */
TEST(test_two_keys) {
  static const struct {
    const char *caller, *called;
    int fits;
  } cases[] = {{KEY, OTHER "," KEY, 1}, {OTHER "," KEY, KEY, 1},
               {KEY "," OTHER, KEY, 1}, {KEY "," OTHER, OTHER "," KEY, 1},
               {KEY, OTHER, 0},         {KEY "," OTHER, "a-third-key-unlike-the-others", 0}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    end_open(&a, cases[i].caller);
    end_open(&b, cases[i].called);
    end_call(&a, b.address);
    UNTIL(&a, &b, cases[i].fits ? a.ups == 1 : a.fails == 1);
    if (cases[i].fits) {
      end_send(&a);
      UNTIL(&a, &b, b.frames == 1);
    } else {
      UNTIL(&a, &b, b.refused > 0);
      assert_int_equal(a.code, MLFAB_ERR_JOB);
      assert_non_null(strstr(a.text, "the caller's key is not this job's (MLFAB_KEY)"));
      assert_non_null(strstr(b.text, "has not this job's key (MLFAB_KEY)"));
      assert_int_equal(a.ups + b.ups, 0);
    }
    end_close(&a);
    end_close(&b);
  }
}

/* --- peers of another kind ---------------------------------------------------------------------- */

TEST_WITH(test_plain_calls_tls, NULL, close_ends) {
  assert_int_equal(end_try(&a, mlfab_transport_tcp(), KEY, "tcp:127.0.0.1:0"), 0);
  end_open(&b, KEY);
  char address[64];
  snprintf(address, sizeof address, "tcp:127.0.0.1:%u", port_of(&b));
  end_call(&a, address);
  UNTIL(&a, &b, a.ups == 1);
  end_send(&a);
  UNTIL(&a, &b, a.downs == 1 && b.refused == 1);
  assert_int_equal(a.code, MLFAB_ERR_JOB);
  assert_non_null(strstr(a.text, "it speaks TLS, and this process does not"));
  assert_non_null(strstr(b.text, "speaks plain TCP, and this process TLS"));
}

TEST_WITH(test_tls_calls_plain, NULL, close_ends) {
  end_open(&a, KEY);
  assert_int_equal(end_try(&b, mlfab_transport_tcp(), KEY, "tcp:127.0.0.1:0"), 0);
  end_call(&a, b.address);
  UNTIL(&a, &b, a.fails == 1 && b.refused == 1);
  assert_int_equal(a.code, MLFAB_ERR_JOB);
  assert_non_null(strstr(a.text, "it speaks plain TCP, and this process TLS"));
  assert_non_null(strstr(b.text, "it speaks TLS, and this process does not"));
}

/* A client of another configuration, in a thread: its handshake must fail. */
typedef struct client {
  tls_client tls;
  uint16_t port;
  int connected, done;
} client;

static void *client_run(void *argument) {
  client *c = argument;
  int fd = wire(c->port);
  SSL *ssl = tls_client_connect(&c->tls, fd);
  /* The called side refuses a client's part of the handshake after the client's end of it. */
  char byte;
  c->connected = ssl && SSL_read(ssl, &byte, 1) > 0;
  SSL_free(ssl);
  close(fd);
  __atomic_store_n(&c->done, 1, __ATOMIC_RELEASE);
  return NULL;
}

static int no_psk(SSL *ssl, const EVP_MD *md, const unsigned char **id, size_t *bytes,
                  SSL_SESSION **psk) {
  (void)ssl, (void)md, (void)id, (void)bytes;
  *psk = NULL;
  return 1;
}

TEST(test_other_clients) {
  for (int kind = 0; kind < 4; kind++) {
    client c = {.done = 0};
    pthread_t thread;
    end_open(&b, KEY);
    tls_client_open(&c.tls, KEY);
    c.port = port_of(&b);
    if (kind == 0) SSL_CTX_set_max_proto_version(c.tls.context, TLS1_2_VERSION);
    if (kind == 1) SSL_CTX_set_psk_use_session_callback(c.tls.context, no_psk);
    if (kind == 2) c.tls.psk[5] ^= 1; /* knows the identity, and not the key */
    if (kind == 3) c.tls.identity[9] ^= 1;
    assert_int_equal(pthread_create(&thread, NULL, client_run, &c), 0);
    UNTIL(&b, &b, b.refused == 1 && __atomic_load_n(&c.done, __ATOMIC_ACQUIRE));
    pthread_join(thread, NULL);
    assert_false(c.connected);
    assert_int_equal(b.ups, 0);
    assert_non_null(strstr(b.text, "has not this job's key"));
    tls_client_close(&c.tls);
    end_close(&b);
  }
}

/* A server with a certificate instead of the key. */
static void *server_run(void *argument) {
  int listener = *(int *)argument;
  SSL_CTX *context = SSL_CTX_new(TLS_server_method());
  EVP_PKEY *key = NULL;
  EVP_PKEY_CTX *make = EVP_PKEY_CTX_new_id(EVP_PKEY_ED25519, NULL);
  X509 *certificate = X509_new();
  if (EVP_PKEY_keygen_init(make) <= 0 || EVP_PKEY_keygen(make, &key) <= 0) abort();
  X509_set_version(certificate, 2);
  X509_gmtime_adj(X509_getm_notBefore(certificate), 0);
  X509_gmtime_adj(X509_getm_notAfter(certificate), 3600);
  X509_set_pubkey(certificate, key);
  if (!X509_sign(certificate, key, NULL)) abort();
  if (!SSL_CTX_use_certificate(context, certificate) || !SSL_CTX_use_PrivateKey(context, key))
    abort();
  int fd = accept(listener, NULL, NULL);
  SSL *ssl = SSL_new(context);
  SSL_set_fd(ssl, fd);
  intptr_t accepted = SSL_accept(ssl) == 1;
  SSL_free(ssl);
  close(fd);
  X509_free(certificate);
  EVP_PKEY_free(key);
  EVP_PKEY_CTX_free(make);
  SSL_CTX_free(context);
  return (void *)accepted;
}

static int listen_here(uint16_t *port_p) {
  struct sockaddr_in at = {.sin_family = AF_INET};
  socklen_t bytes = sizeof at;
  at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  assert_int_equal(bind(fd, (const struct sockaddr *)(const void *)&at, sizeof at), 0);
  assert_int_equal(listen(fd, 64), 0);
  assert_int_equal(getsockname(fd, (struct sockaddr *)(void *)&at, &bytes), 0);
  *port_p = ntohs(at.sin_port);
  return fd;
}

TEST_WITH(test_server_with_a_certificate, one_end, close_ends) {
  uint16_t port;
  int listener = listen_here(&port);
  char address[64];
  pthread_t thread;
  void *accepted;
  snprintf(address, sizeof address, "tls:127.0.0.1:%u", port);
  assert_int_equal(pthread_create(&thread, NULL, server_run, &listener), 0);
  end_call(&a, address);
  UNTIL(&a, &a, a.fails == 1);
  assert_int_equal(a.ups, 0);
  assert_int_equal(a.code, MLFAB_ERR_CRC);
  assert_non_null(strstr(a.text, "made without this job's key"));
  pthread_join(thread, &accepted);
  assert_null(accepted);
  close(listener);
}

/* --- strangers ---------------------------------------------------------------------------------- */

/* Callers that say nothing, or half a hello, get no SSL object, and go after two seconds. */
TEST_WITH(test_strangers, one_end, close_ends) {
  enum { MANY = 40 };
  static const uint8_t half[] = {22, 3, 1, 1, 0, 1, 0, 0};
  int fds[MANY];
  int64_t before = __atomic_load_n(&openssl_bytes, __ATOMIC_RELAXED), bytes = a.bytes;
  for (int i = 0; i < MANY; i++) {
    fds[i] = wire(port_of(&a));
    if (i % 2) assert_int_equal(send(fds[i], half, sizeof half, MSG_NOSIGNAL), sizeof half);
  }
  uint64_t begin = conform_now(NULL), looks = 0;
  int64_t most = 0;
  while (a.refused < MANY && conform_now(NULL) - begin < WAIT_MS * 1000000ull) {
    end_poll(&a);
    if (a.bytes - bytes > most) most = a.bytes - bytes;
    assert_int_equal(openssl_bytes, before);
    a.table->wait(a.self, 100000000);
    looks++;
  }
  uint64_t took = conform_now(NULL) - begin;
  assert_int_equal(a.refused, MANY);
  assert_true(took >= 1900000000u && took < 4000000000u);
  assert_true(looks < 200); /* half a hello keeps nobody awake */
  assert_non_null(strstr(a.text, "in time"));
  printf("# %d strangers: %lld bytes each until then\n", MANY, (long long)(most / MANY));
  for (int i = 0; i < MANY; i++) close(fds[i]);
}

TEST_WITH(test_left_in_the_middle, one_end, close_ends) {
  static const uint8_t half[] = {22, 3, 1, 1, 0, 1, 0, 0};
  uint64_t begin = conform_now(NULL);
  for (size_t n = 0; n <= sizeof half; n++) {
    int fd = wire(port_of(&a));
    assert_int_equal(send(fd, half, n, MSG_NOSIGNAL), n);
    end_poll(&a);
    usleep(1000);
    end_poll(&a);
    close(fd);
    UNTIL(&a, &a, a.refused == n + 1);
  }
  assert_true(conform_now(NULL) - begin < 1900000000u);
}

/* A server that accepts and says nothing fails the call after two seconds. */
TEST_WITH(test_silent_server, one_end, close_ends) {
  uint16_t port;
  int listener = listen_here(&port);
  char address[64];
  snprintf(address, sizeof address, "tls:127.0.0.1:%u", port);
  end_call(&a, address);
  UNTIL(&a, &a, a.fails == 1);
  assert_int_equal(a.code, MLFAB_ERR_TIMEOUT);
  end_call(&a, address); /* closed under way */
  end_poll(&a);
  close(listener);
}

/* --- the traffic ------------------------------------------------------------------------------ */

/* A process in the middle, driven by the test. It keeps what it passes on, and changes one byte. When the caller calls
 * again, it passes that on, unchanged. */
typedef struct middle {
  int listener, side[2]; /* 0: the caller's */
  uint16_t port, to;
  int calls;
  uint8_t seen[2][RELAY_MOST]; /* from side 0, from side 1 */
  size_t bytes[2];
  int flip_side; /* -1: none, and both send one frame only */
  size_t flip_at;
  uint8_t flip;
} middle;

static void middle_open(middle *m, uint16_t port) {
  memset(m, 0, sizeof *m);
  m->listener = listen_here(&m->port);
  fcntl(m->listener, F_SETFL, O_NONBLOCK);
  m->side[0] = -1;
  m->to = port;
  m->side[1] = -1;
  m->flip_side = -1;
}

static void middle_close(middle *m) {
  close(m->listener);
  for (int s = 0; s < 2; s++)
    if (m->side[s] >= 0) close(m->side[s]);
}

static void middle_pump(middle *m) {
  int fd = accept(m->listener, NULL, NULL), one = 1;
  if (fd >= 0) {
    for (int s = 0; s < 2 && m->calls; s++) close(m->side[s]);
    m->calls++;
    m->side[0] = fd;
    m->side[1] = wire(m->to);
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  }
  for (int s = 0; s < 2; s++) {
    if (m->side[s] < 0 || m->side[!s] < 0) continue;
    uint8_t data[8192];
    ssize_t n = recv(m->side[s], data, sizeof data, MSG_DONTWAIT);
    if (n == 0) shutdown(m->side[!s], SHUT_WR);
    if (n <= 0) continue;
    size_t end_at = m->bytes[s] + (size_t)n;
    if (m->calls == 1) {
      if (s == m->flip_side && m->flip_at >= m->bytes[s] && m->flip_at < end_at)
        data[m->flip_at - m->bytes[s]] ^= m->flip;
      assert_true(end_at <= RELAY_MOST);
      memcpy(m->seen[s] + m->bytes[s], data, (size_t)n);
      m->bytes[s] = end_at;
    }
    (void)!send(m->side[!s], data, (size_t)n, MSG_NOSIGNAL);
  }
}

/* A calls B through the middle and sends a frame, B answers with one. Returns when both have arrived, or A has given up: 1
 * or 0. Where a byte is changed, both go on sending until then, as nodes do: a record that has become longer waits for more. */
static int middle_talk(middle *m) {
  char address[64];
  uint64_t begin = conform_now(NULL);
  uint32_t ups = a.ups, mine = b.ups, got = b.frames, back = a.frames, asked = 0, answered = 0;
  uint32_t lost = a.fails + a.downs;
  snprintf(address, sizeof address, "tls:127.0.0.1:%u", m->port);
  end_call(&a, address);
  while (a.frames == back && a.fails + a.downs == lost) {
    if (conform_now(NULL) - begin > WAIT_MS * 1000000ull) fail_msg("nothing happened");
    end_poll(&a);
    end_poll(&b);
    middle_pump(m);
    uint32_t ms = (uint32_t)((conform_now(NULL) - begin) / 1000000);
    if (m->flip_side < 0) ms = 0;
    if (a.ups > ups && asked <= ms / 2) asked++, end_send(&a);
    if (b.ups > mine && b.frames > got && answered <= ms / 2) answered++, end_send(&b);
  }
  return a.frames > back;
}

/* All traffic of both ends goes through the middle. */
static void middle_listens(middle *m) {
  middle_open(m, port_of(&b));
  assert_true(middle_talk(m));
}

static int contains(const uint8_t *data, size_t bytes, const char *text) {
  size_t n = strlen(text);
  for (size_t i = 0; i + n <= bytes; i++)
    if (!memcmp(data + i, text, n)) return 1;
  return 0;
}

/* What was sent is not in the traffic, nor anything that a frame or the key contains. */
TEST_WITH(test_traffic_is_encrypted, two_ends, close_ends) {
  static middle m;
  middle_listens(&m);
  for (int s = 0; s < 2; s++) {
    assert_true(m.bytes[s] > 300);
    assert_false(contains(m.seen[s], m.bytes[s], "MLFB"));
    assert_false(contains(m.seen[s], m.bytes[s], "weights"));
    assert_false(contains(m.seen[s], m.bytes[s], "nobody"));
    assert_false(contains(m.seen[s], m.bytes[s], "key"));
  }
  middle_close(&m);
}

/* Every byte of the handshake and of the frames, changed in one bit: never a changed frame, never both frames; and one of
 * the ends counts it. */
TEST_WITH(test_changed_bytes, two_ends, close_ends) {
  static middle m;
  size_t all[2], again = 0;
  middle_listens(&m);
  memcpy(all, m.bytes, sizeof all);
  middle_close(&m);
  UNTIL(&a, &b, a.downs == 1 && b.downs == 1);
  for (int s = 0; s < 2; s++) {
    for (size_t at = 0; at < all[s]; at++) {
      middle_open(&m, port_of(&b));
      m.flip_side = s;
      m.flip_at = at;
      m.flip = (uint8_t)(1 << at % 8);
      uint32_t counted = a.counted + b.counted;
      /* RFC 8446 5.1: the version of the first record, in clear, is ignored. */
      int both = middle_talk(&m), version = at == 1 || at == 2;
      if (both && m.calls == 1 && !version)
        fail_msg("byte %zu of side %d was changed, unnoticed", at, s);
      again += m.calls > 1;
      middle_close(&m);
      UNTIL(&a, &b, a.ups == a.downs && b.ups == b.downs);
      UNTIL(&a, &b, version || a.counted + b.counted > counted);
    }
  }
  assert_in_range(again, 22, 60); /* the name of the key: its call is repeated */
  printf("# %zu and %zu bytes changed\n", all[0], all[1]);
}

/* What was recorded is worth nothing to the called node, nor to a caller. */
TEST_WITH(test_repeated_traffic, two_ends, close_ends) {
  static middle m;
  uint16_t port;
  char address[64];
  middle_listens(&m);
  middle_close(&m);
  UNTIL(&a, &b, a.downs == 1 && b.downs == 1);
  uint32_t frames = b.frames, ups = b.ups;
  int fd = wire(port_of(&b));
  assert_int_equal(send(fd, m.seen[0], m.bytes[0], MSG_NOSIGNAL), m.bytes[0]);
  UNTIL(&a, &b, b.refused == 1);
  close(fd);
  int listener = listen_here(&port);
  snprintf(address, sizeof address, "tls:127.0.0.1:%u", port);
  uint32_t mine = a.ups;
  end_call(&a, address);
  end_poll(&a);
  fd = accept(listener, NULL, NULL);
  assert_int_equal(send(fd, m.seen[1], m.bytes[1], MSG_NOSIGNAL), m.bytes[1]);
  UNTIL(&a, &b, a.fails == 1);
  assert_int_equal(a.code, MLFAB_ERR_CRC);
  close(fd);
  close(listener);
  assert_int_equal(b.frames, frames);
  assert_int_equal(b.ups, ups);
  assert_int_equal(a.ups, mine);
}

/* A child that closes what it inherited says nothing to the parent's peers. */
TEST_WITH(test_fork, two_ends, close_ends) {
  int status;
  end_call(&a, b.address);
  UNTIL(&a, &b, a.ups == 1);
  end_send(&a);
  UNTIL(&a, &b, b.ups == 1 && b.frames == 1);
  pid_t child = fork();
  if (child == 0) {
    a.table->close(a.self);
    b.table->close(b.self);
    _exit(0);
  }
  assert_int_equal(waitpid(child, &status, 0), child);
  assert_int_equal(status, 0);
  end_send(&a);
  UNTIL(&a, &b, b.frames == 2);
  assert_int_equal(a.downs + b.downs, 0);
}

int main(int argc, char **argv) {
  CRYPTO_set_mem_functions(counted_allocate, counted_change, counted_free);
  signal(SIGPIPE, SIG_DFL); /* the transport raises none */
  return testing_run(argc - 1, argv + 1, NULL, NULL);
}
