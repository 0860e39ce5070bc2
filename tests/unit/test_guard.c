/* test_guard.c - a fabric with a key: what a stranger on the network can do to it.
 *
 * Queues join three hand-driven nodes (node 0 serves, all are workers), see queues.h. Whoever is between them reads, changes,
 * repeats, reorders and reflects frames, and knows every checksum, but not the key. "The outside" has links of its own.
 * The oracle is the model: every push counts once, whatever happens on the way. */
#include "core/keys/session.h"

enum { QUEUE = 1024, LINKS = 4096 };
#include "queues.h"

enum { LENGTHS = 16 /* in a header */, COUNT = 500, FRAMES = 4000, PUSHES = 2 };
#define BEAT 50000000u
static const char KEY[] = "0123456789abcdef0123456789abcdef", OTHER[] = "another key, 16+";
static const char OLD[] = "an-old-key-0123456789";

/* What the one in between does to frame number `at` of the run. LONGER: before it, its header comes with another length;
 * EARLIER: after it, its header comes again; AHEAD: before it, the next header comes; BEHIND: the next comes in its midst. */
enum { HONEST, FLIP, TWICE, LATE, BACK, RETAG, UNTAG, LONGER, EARLIER, AHEAD, BEHIND };

static struct {
  mlfab__rng prng;
  int how;
  int announces; /* headers are reported before their frames, and as if in the midst of others */
  uint32_t at, frames; /* frames so far */
  uint8_t type[FRAMES], tagged[FRAMES];
  int done_to; /* the frame was changed: the node that got it */
  mlfab_io_event held;
  int held_for;
  uint64_t held_bytes; /* of node 0's memory */
  uint8_t keys[64];    /* K must not be in memory that is given back */
  int leaks;
} n;

/* The report of a transport about a frame of which it has only the header. */
static mlfab_io_event head_event(const mlfab_io_event *frame, int midst) {
  mlfab_io_event e = frame_event(frame->link, frame->head, MLFAB_HEADER_BYTES, NULL, 0);
  e.kind = MLFAB_IO_HEAD;
  e.token = (uint64_t)midst;
  return e;
}

/* Makes all checksums right. */
static void checksum(mlfab_io_event *e) {
  uint8_t *head = (uint8_t *)(uintptr_t)e->head, tag[MLFAB__TAG_BYTES];
  uint32_t crc = mlfab__crc32c(0, head + MLFAB_HEADER_BYTES, e->head_bytes - MLFAB_HEADER_BYTES);
  memcpy(head + 12, &crc, 4);
  memcpy(tag, head + MLFAB__TAG_AT, sizeof tag);
  mlfab__wire_tag(head, tag);
}

static void flip(mlfab_io_event *e, uint64_t bit) {
  uint8_t *head = (uint8_t *)(uintptr_t)e->head, *bulk = (uint8_t *)(uintptr_t)e->bulk;
  uint64_t heads = 8u * (uint64_t)e->head_bytes;
  if (bit / 64 == 1) bit += 64; /* the checksums */
  if (bit < heads)
    head[bit / 8] ^= (uint8_t)(1u << bit % 8);
  else
    bulk[(bit - heads) / 8] ^= (uint8_t)(1u << bit % 8);
  checksum(e);
}

/* A frame is on its way. */
static void carry(int me, int to, mlfab_io_event e) {
  const uint8_t *head = e.head;
  uint32_t number = n.frames++;
  int how = number == n.at && n.done_to < 0 ? n.how : HONEST;
  if (number < FRAMES) n.type[number] = head[5], n.tagged[number] = head[6] >> 1 & 1;
  if (how != HONEST) n.done_to = how == BACK ? me : to;
  if (how == FLIP) flip(&e, mlfab__rng_below(&n.prng, 8 * ((uint64_t)e.head_bytes + e.bulk_bytes)));
  uint8_t *own = (uint8_t *)(uintptr_t)e.head;
  if (how == RETAG) {
    for (uint32_t i = 0; i < 16; i++) own[MLFAB__TAG_AT + i] = (uint8_t)mlfab__rng_next(&n.prng);
    checksum(&e);
  }
  if (how == UNTAG) {
    own[6] &= (uint8_t)~MLFAB__WIRE_TAGGED;
    memset(own + MLFAB__CODE_AT, 0, 20);
    checksum(&e);
  }
  if (n.announces || how == LONGER) {
    mlfab_io_event h = head_event(&e, 0);
    uint8_t *change = (uint8_t *)(uintptr_t)h.head;
    if (how == LONGER) change[LENGTHS + mlfab__rng_below(&n.prng, 8)] ^= 1;
    post(to, h);
    if (n.announces) post(to, head_event(&e, 1));
  }
  if (how == TWICE) post(to, frame_event(e.link, e.head, e.head_bytes, e.bulk, e.bulk_bytes));
  if (how == BACK) post(me, frame_event(e.link, e.head, e.head_bytes, e.bulk, e.bulk_bytes));
  if (how == LATE || how == AHEAD || how == BEHIND) {
    n.held = e;
    n.held_for = to;
    return;
  }
  if (n.held_for == to && n.held.link == e.link && n.how >= AHEAD) {
    post(to, head_event(&e, n.how == BEHIND));
    post(to, n.held);
    n.held_for = -1;
  }
  post(to, e);
  if (how == EARLIER) post(to, head_event(&e, 0));
  if (n.held_for == to && n.held.link == e.link) {
    post(to, n.held);
    n.held_for = -1;
  }
}
static void turn(void) {
  q.now += 100000;
  for (int i = 0; i < NODES; i++) {
    if (!q.node[i]) continue;
    for (int k = 0; k < 8 && q.taken[i] != q.put[i]; k++) {
      mlfab_io_event e = q.queue[i][q.taken[i]++ % QUEUE];
      mlfab_node_event(q.node[i], &e, q.now);
      drop_event(&e);
      acts(i);
    }
    if (mlfab_node_deadline(q.node[i]) <= q.now) mlfab_node_tick(q.node[i], q.now);
    acts(i);
  }
}

/* --- nodes --- */

static void *take(void *user, size_t bytes) {
  (void)user;
  n.held_bytes += bytes;
  return malloc(bytes);
}

static void give(void *user, void *memory, size_t bytes) {
  (void)user;
  n.held_bytes -= bytes;
  for (size_t i = 0; memory && i + 64 <= bytes; i += 8) {
    n.leaks += !memcmp((const char *)memory + i, n.keys, 64);
    n.leaks += !memcmp((const char *)memory + i, KEY, 32);
  }
  free(memory);
}

static void net_begin(uint64_t seed) {
  mlfab__fabric_keys keys;
  const char *why;
  memset(&n, 0, sizeof n);
  memset(&q, 0, sizeof q);
  n.done_to = n.held_for = -1;
  n.at = UINT32_MAX;
  q.now = 1000 * seed;
  mlfab__rng_seed(&n.prng, seed);
  assert_int_equal(mlfab__keys_parse(KEY, &keys, &why), 0);
  memcpy(n.keys, keys.key[0], sizeof n.keys);
}

static void net_open(int i, const char *key) {
  mlfab_config c;
  mlfab_env env = {.size = sizeof env, .allocate = take, .release = give};
  char address[24];
  mlfab_config_init(&c);
  c.rank = i;
  c.workers = NODES;
  c.heartbeat_ns = BEAT;
  c.timeout_ns = 20000000000u;
  c.env = &env;
  c.entropy[0] = (uint8_t)i;
  strcpy(c.key, key);
  strcpy(c.coordinator, "queue:0");
  snprintf(address, sizeof address, "queue:%d", i);
  assert_int_equal(mlfab_node_open(&c, address, q.now, &q.node[i], NULL), 0);
}

static void net_close(void) {
  for (int i = NODES - 1; i >= 0; i--) shut(i);
  if (n.held_for >= 0) drop_event(&n.held);
  assert_int_equal(n.held_bytes, 0);
  assert_int_equal(n.leaks, 0);
}

static uint64_t refused(void) {
  uint64_t sum = 0;
  for (int i = 0; i < NODES; i++)
    if (q.node[i]) sum += stats(i).frames_refused + stats(i).strangers_refused;
  return sum;
}

/* Waits until all have joined; the first error, or 0. */
static int join(void) {
  for (int ready = 0; ready < NODES; turn()) {
    ready = 0;
    for (int i = 0; i < NODES; i++) {
      int code = mlfab_node_ready(q.node[i], NULL);
      if (code < 0) return code;
      ready += code;
    }
  }
  return 0;
}

static void define(void) {
  static float w[COUNT];
  mlfab_buf first = {0, 0, w, COUNT};
  mlfab_model_options o = {.size = sizeof o, .sync = MLFAB_SYNC_ASYNC, .slices = 2};
  mlfab_request request[NODES];
  for (int k = 0; k < COUNT; k++) w[k] = (float)k;
  for (int i = 0; i < NODES; i++) {
    BEGIN(i, NULL, TENSOR_ADD, .tensor = 0, .dtype = MLFAB_F32, .count = COUNT);
    BEGIN(i, &request[i], MODEL_START, .options = &o, .bufs = &first, .n = 1);
  }
  for (int i = 0; i < NODES; i++) assert_int_equal(finish(i, request[i]), 0);
}

/* A fabric whose members have all the key, and the model. */
static void begin(uint64_t seed) {
  net_begin(seed);
  for (int i = 0; i < NODES; i++) net_open(i, KEY);
  assert_int_equal(join(), 0);
  define();
}

/* Pushes, an allreduce over links between workers, and what a pull shows afterwards. */
static void work(void) {
  static float one[COUNT], w[COUNT], sum[NODES][COUNT];
  mlfab_request request[NODES];
  mlfab_buf u = {0, 0, one, COUNT}, b = {0, 0, w, COUNT};
  for (int k = 0; k < COUNT; k++) one[k] = 1;
  for (int p = 0; p < PUSHES; p++) {
    for (int i = 0; i < NODES; i++) BEGIN(i, &request[i], PUSH, .bufs = &u, .n = 1);
    for (int i = 0; i < NODES; i++) assert_int_equal(finish(i, request[i]), 0);
  }
  for (int i = 0; i < NODES; i++) {
    mlfab_vec v = {sum[i], COUNT};
    for (int k = 0; k < COUNT; k++) sum[i][k] = (float)(i + k);
    BEGIN(i, &request[i], ALLREDUCE, .vecs = &v, .n = 1, .dtype = MLFAB_F32);
  }
  for (int i = 0; i < NODES; i++) assert_int_equal(finish(i, request[i]), 0);
  for (int i = 0; i < NODES; i++)
    for (int k = 0; k < COUNT; k++) assert_true(sum[i][k] == (float)(3 * k + 3));
  CALL(1, PULL, .bufs = &b, .n = 1);
  for (int k = 0; k < COUNT; k++) assert_true(w[k] == (float)(k + PUSHES * NODES));
}

static int is_proving(uint8_t type) {
  return type == MLFAB__CHALLENGE || type == MLFAB__ANSWER || type == MLFAB__PROOF;
}

/* --- tests --- */

/* Honest: all frames after the proofs have tags, and none before. Without tags are links whose both ends are vouched for. */
TEST(test_honest) {
  for (int way = 0; way < 8; way++) {
    int vouched = way % 4 == 3;
    net_begin(3);
    n.announces = way / 4;
    q.caps = way & 1 ? MLFAB_CAP_VOUCHED : 0;
    q.called_caps = way & 2 ? MLFAB_CAP_VOUCHED : 0;
    for (int i = 0; i < NODES; i++) net_open(i, KEY);
    assert_int_equal(join(), 0);
    define();
    work();
    assert_int_equal(refused(), 0);
    for (uint32_t f = 0; f < n.frames && f < FRAMES; f++)
      assert_int_equal(n.tagged[f], !vouched && !is_proving(n.type[f]));
    net_close();
  }
}

/* A whole run with one frame changed. Returns 0 when the run has fewer frames. */
static int tampered(int how, uint32_t at, uint64_t seed) {
  net_begin(seed);
  n.how = how;
  n.at = at;
  for (int i = 0; i < NODES; i++) net_open(i, KEY);
  int code = join();
  if (code == 0) {
    define();
    work();
  }
  int changed = n.done_to >= 0;
  uint8_t type = changed ? n.type[at] : 0;
  /* Only a refusal of what a challenge asks can end a join; everything else is tried again. */
  if (code) {
    assert_int_equal(type, MLFAB__CHALLENGE);
    assert_int_equal(code, MLFAB_ERR_JOB);
  }
  run(4 * BEAT);
  /* After WELCOME and BYE their receiver hears nothing more on the link. */
  int last = how != FLIP && (type == MLFAB__WELCOME || type == MLFAB__BYE);
  last |= (how == UNTAG || how >= LONGER) && is_proving(type);
  last |= n.held_for >= 0; /* no other frame came on that link: it was lost, not late */
  if (changed && !last && refused() == 0)
    fail_msg("frame %u (%s) was changed in way %d, and nobody noticed", at, mlfab__frame_name(type),
             how);
  net_close();
  return changed;
}

TEST(test_tampering) {
  for (int how = FLIP; how <= BEHIND; how++) {
    for (uint32_t at = 0; tampered(how, at, 17 * at + (uint32_t)how);
         at += 1 + (at > 60 ? at % 3 : 0))
      continue;
  }
}

/* Every bit of a frame is under its tag, and so is its place; also where a key of its own covers the bulk. */
static void every_bit(uint32_t bytes) {
  mlfab__session session;
  uint8_t key[64] = {1}, head[MLFAB_HEADER_BYTES + 24], bulk[MLFAB__TAG_LARGE + 200];
  uint8_t tag[16], other[16];
  mlfab__challenge challenge = {.node = 1, .first = MLFAB__JOIN};
  mlfab__answer answer = {.number = 0};
  assert_true(bytes <= sizeof bulk);
  mlfab__session_derive(&session, key, &challenge, &answer, 0);
  for (size_t i = 0; i < sizeof head; i++) head[i] = (uint8_t)(7 * i);
  for (size_t i = 0; i < bytes; i++) bulk[i] = (uint8_t)(11 * i);
  mlfab__session_tag(session.out, 5, head, sizeof head, bulk, bytes, tag);
  for (uint32_t bit = 0; bit < 8 * (sizeof head + bytes); bit++) {
    uint8_t *at = bit < 8 * sizeof head ? &head[bit / 8] : &bulk[bit / 8 - sizeof head];
    int outside = (bit / 8 >= 8 && bit / 8 < 12) || (bit / 8 >= 48 && bit / 8 < 64);
    *at ^= (uint8_t)(1u << bit % 8);
    mlfab__session_tag(session.out, 5, head, sizeof head, bulk, bytes, other);
    assert_int_equal(memcmp(tag, other, 16) == 0, outside); /* the checksum and the tag itself */
    *at ^= (uint8_t)(1u << bit % 8);
  }
  for (uint64_t counter = 0; counter < 200; counter++) {
    mlfab__session_tag(session.out, counter, head, sizeof head, bulk, bytes, other);
    assert_int_equal(memcmp(tag, other, 16) == 0, counter == 5);
  }
  mlfab__session_tag(session.in, 5, head, sizeof head, bulk, bytes, other);
  assert_true(memcmp(tag, other, 16) != 0);
}

TEST(test_every_bit) {
  every_bit(40);
  every_bit(MLFAB__TAG_LARGE - 1);
  every_bit(MLFAB__TAG_LARGE);
  every_bit(MLFAB__TAG_LARGE + 193);
}

/* The ends of a link agree on the code of a header, in any order of counters; it tells counters, lengths and directions
 * apart. */
TEST(test_codes) {
  mlfab__session caller, called;
  uint8_t key[64] = {1};
  mlfab__challenge challenge = {.node = 1, .first = MLFAB__JOIN};
  mlfab__answer answer = {.number = 0};
  uint32_t codes[200], same = 0;
  mlfab__session_derive(&caller, key, &challenge, &answer, 0);
  mlfab__session_derive(&called, key, &challenge, &answer, 1);
  for (uint32_t i = 0; i < 200; i++)
    codes[i] = mlfab__session_code(caller.out, &caller.codes_out, i, 40, 4096);
  for (uint32_t i = 200; i-- > 0;) {
    mlfab__codes *in = &called.codes_in;
    assert_int_equal(mlfab__session_code(called.in, in, i, 40, 4096), codes[i]);
    same += mlfab__session_code(called.in, in, i, 41, 4096) == codes[i];
    same += mlfab__session_code(called.in, in, i, 40, 4097) == codes[i];
    same += mlfab__session_code(called.in, in, i, 4096, 40) == codes[i];
    same += mlfab__session_code(called.in, in, i + 1, 40, 4096) == codes[i];
    same += mlfab__session_code(called.out, &called.codes_out, i, 40, 4096) == codes[i];
    for (uint32_t k = 0; k < i; k++) same += codes[k] == codes[i];
  }
  assert_int_equal(same, 0);
}

/* The secrets of a link depend on all that was said, and its two ends agree. */
TEST(test_transcript) {
  mlfab__challenge c = {
      .node = 1, .roles = 3, .epoch = 4, .first = 5, .to = 6, .of = 14, .nonce = {7, 8}};
  mlfab__answer a = {.number = 9, .roles = 10, .epoch = 11, .nonce = {12, 13}};
  uint8_t key[64] = {1};
  mlfab__session one, other, changed;
  mlfab__session_derive(&one, key, &c, &a, 0);
  mlfab__session_derive(&other, key, &c, &a, 1);
  assert_memory_equal(one.own, other.theirs, 16);
  assert_memory_equal(one.theirs, other.own, 16);
  assert_memory_equal(one.in, other.out, 64);
  assert_memory_equal(one.out, other.in, 64);
  assert_true(memcmp(one.own, one.theirs, 16) && memcmp(one.in, one.out, 64));
  for (uint32_t i = 0; i < sizeof c; i++) {
    if (i >= 28 && i < 32) continue; /* padding */
    ((uint8_t *)&c)[i] ^= 1;
    mlfab__session_derive(&changed, key, &c, &a, 0);
    assert_true(memcmp(changed.own, one.own, 16) && memcmp(changed.theirs, one.theirs, 16));
    assert_true(memcmp(changed.out, one.out, 64) && memcmp(changed.in, one.in, 64));
    ((uint8_t *)&c)[i] ^= 1;
  }
  for (uint32_t i = 0; i < offsetof(mlfab__answer, proof); i++) {
    if (i >= 20 && i < 24) continue; /* padding */
    ((uint8_t *)&a)[i] ^= 1;
    mlfab__session_derive(&changed, key, &c, &a, 0);
    assert_true(memcmp(changed.own, one.own, 16) && memcmp(changed.in, one.in, 64));
    ((uint8_t *)&a)[i] ^= 1;
  }
}

/* --- the outside --- */

static uint32_t dial(void) { return dial_with(0, 0); }

static void say(uint32_t link, uint8_t type, unsigned flags, const uint8_t *meta, uint32_t bytes) {
  uint8_t head[MLFAB_HEADER_BYTES + 256], tag[16];
  mlfab__header header = {.type = type, .flags = (uint16_t)flags, .meta_bytes = bytes};
  if (type != MLFAB__CHALLENGE && type != MLFAB__PROOF) {
    header.job = mlfab__hash(0, "mlfab", 5);
    header.sender = header.incarnation = 1;
  }
  memcpy(head + MLFAB_HEADER_BYTES, meta, bytes);
  mlfab__wire_seal(head, &header, NULL);
  for (int i = 0; i < 16; i++) tag[i] = (uint8_t)mlfab__rng_next(&n.prng);
  if (flags & MLFAB__WIRE_TAGGED) mlfab__wire_tag(head, tag);
  post(0, frame_event(link, head, MLFAB_HEADER_BYTES + bytes, NULL, 0));
  run(500000);
}
/* A caller begins so; everybody can read the name of a key. */
static mlfab__challenge challenge_of(uint32_t node, mlfab__fabric_keys *keys) {
  const char *why;
  mlfab__challenge c = {
      .node = node, .roles = MLFAB_ROLE_WORKER, .epoch = 1, .first = MLFAB__HELLO};
  assert_int_equal(mlfab__keys_parse(KEY, keys, &why), 0);
  memcpy(c.keys, keys->name, sizeof c.keys);
  return c;
}

static uint32_t dial_asking(const mlfab__challenge *c, uint32_t caps) {
  uint8_t meta[MLFAB__KEYS_META];
  uint32_t link = dial_with(0, caps);
  say(link, MLFAB__CHALLENGE, 0, meta, mlfab__encode_challenge(meta, c));
  assert_int_equal(q.heard_type, MLFAB__ANSWER);
  return link;
}

/* Every type of frame, with every state of the link, from a process without the key. */
TEST(test_forged) {
  uint8_t meta[256];
  mlfab__proof proof;
  mlfab__fabric_keys keys;
  mlfab__challenge c = challenge_of(1, &keys);
  begin(5);
  for (unsigned type = 1; type < MLFAB__FRAME_TYPES; type++) {
    if (!strcmp(mlfab__frame_name((uint8_t)type), "UNKNOWN")) continue;
    for (int asked = 0; asked < 2; asked++) {
      for (unsigned flags = 0; flags < 4; flags += 2) {
        uint64_t before = refused();
        uint32_t link = asked ? dial_asking(&c, 0) : dial();
        memset(&proof, 7, sizeof proof);
        proof.challenge = c;
        uint32_t bytes = mlfab__encode_proof(meta, &proof);
        if (type != MLFAB__PROOF)
          for (bytes = 0; bytes < 60; bytes++) meta[bytes] = (uint8_t)mlfab__rng_next(&n.prng);
        say(link, (uint8_t)type, flags, meta, bytes);
        run(1000000);
        if (q.link[link].up) fail_msg("a forged %s is taken", mlfab__frame_name((uint8_t)type));
        if (type != MLFAB__BYE) assert_true(refused() > before);
        assert_true(q.heard_type == MLFAB__REFUSE || q.heard_type == MLFAB__ANSWER ||
                    q.heard_all == 0);
        assert_int_equal(q.heard_all, q.heard);
      }
    }
  }
  /* The peer learns why, and nothing else. */
  uint32_t link = dial();
  say(link, MLFAB__HELLO, 0, meta, 40);
  assert_int_equal(q.heard_type, MLFAB__REFUSE);
  assert_int_equal(q.refuse.code, MLFAB_ERR_JOB);
  assert_non_null(strstr(q.refuse.text, "this job has a key"));
  for (int i = 24; i < 44; i++) assert_int_equal(q.last[i], 0); /* job, epoch, sender, ... */
  /* A challenge with a value that has no meaning, or that is cut off. */
  for (unsigned cut = 0; cut < 2; cut++) {
    c.vouched = 2 * !cut;
    link = dial();
    say(link, MLFAB__CHALLENGE, 0, meta, mlfab__encode_challenge(meta, &c) - cut);
    assert_int_equal(q.heard_type, MLFAB__REFUSE);
    assert_non_null(strstr(q.refuse.text, "a challenge that does not parse"));
  }
  work();
  net_close();
}

/* A link of a process that has the key and has announced HELLO from this node. Its frames need no tags. */
static uint32_t dial_proven(uint32_t node) {
  mlfab__answer answer = {0};
  mlfab__proof proof;
  mlfab__session session;
  mlfab__fabric_keys keys;
  uint8_t meta[MLFAB__KEYS_META];
  mlfab__challenge c = challenge_of(node, &keys);
  c.of = MLFAB_ROLE_SERVER;
  c.vouched = 1;
  uint32_t link = dial_asking(&c, MLFAB_CAP_VOUCHED), bytes = mlfab__encode_answer(meta, &answer);
  assert_int_equal(mlfab__decode_answer(q.last + MLFAB_HEADER_BYTES, bytes, &answer), 0);
  mlfab__session_derive(&session, keys.key[0], &c, &answer, 0);
  proof.challenge = c;
  memcpy(proof.proof, session.own, sizeof proof.proof);
  say(link, MLFAB__PROOF, 0, meta, mlfab__encode_proof(meta, &proof));
  assert_true(q.link[link].up);
  q.heard_all = 0;
  return link;
}

/* A process with the key begins with another frame than its challenge has announced: its link is given up unheard. */
TEST(test_not_announced) {
  static const uint8_t first[] = {MLFAB__JOIN, MLFAB__HEARTBEAT, MLFAB__REFUSE, MLFAB__BYE,
                                  MLFAB__HELLO};
  uint8_t meta[256];
  const mlfab__hello hello = {.node = 1, .incarnation = 1, .roles = MLFAB_ROLE_WORKER};
  uint32_t bytes = mlfab__encode_hello(meta, &hello);
  begin(12);
  for (size_t i = 0; i < sizeof first; i++) {
    uint64_t before = refused();
    uint32_t link = dial_proven(first[i] == MLFAB__HELLO ? 2 : 1);
    say(link, first[i], 0, meta, bytes); /* from node 1 */
    assert_false(q.link[link].up);
    assert_int_equal(q.heard_all, 0);
    assert_int_equal(refused(), before + 1);
  }
  work();
  net_close();
}

/* A recorded conversation is worthless on a new link. */
TEST(test_replayed_proof) {
  static mlfab_io_event kept[3];
  int got = 0;
  net_begin(6);
  net_open(0, KEY);
  net_open(1, KEY);
  for (int turns = 0; turns < 2000 && got < 3; turns++) {
    turn();
    for (unsigned k = q.taken[0]; k != q.put[0] && got < 3; k++) { /* frames that wait for node 0 */
      const mlfab_io_event *e = &q.queue[0][k % QUEUE];
      static const uint8_t wanted[3] = {MLFAB__CHALLENGE, MLFAB__PROOF, MLFAB__JOIN};
      if (e->kind == MLFAB_IO_FRAME && ((const uint8_t *)e->head)[5] == wanted[got])
        kept[got++] = frame_event(0, e->head, e->head_bytes, NULL, 0);
    }
  }
  assert_int_equal(got, 3);
  for (int rounds = 0; rounds < 3; rounds++) {
    uint64_t before = refused();
    uint32_t link = dial();
    for (int i = 0; i < 3 && q.link[link].up; i++) {
      post(0, frame_event(link, kept[i].head, kept[i].head_bytes, NULL, 0));
      run(500000);
    }
    assert_false(q.link[link].up);
    assert_true(refused() > before);
  }
  for (int i = 0; i < 3; i++) drop_event(&kept[i]);
  net_open(2, KEY);
  assert_int_equal(join(), 0);
  net_close();
}

/* A call that somebody leads to another member, or to himself, says nothing there. */
TEST(test_led_astray) {
  mlfab_error error;
  net_begin(7);
  net_open(0, KEY);
  net_open(1, KEY);
  q.turned = 2;
  q.turned_to = 1;
  net_open(2, KEY);
  for (int i = 0; i < 20000 && mlfab_node_ready(q.node[2], NULL) == 0; i++) turn();
  assert_int_equal(mlfab_node_ready(q.node[2], &error), MLFAB_ERR_REFUSED);
  assert_non_null(strstr(error.text, "worker 1 answers at the address of server 0"));
  net_close();

  net_begin(8);
  net_open(0, KEY);
  net_open(1, KEY);
  q.turned = 1;
  q.turned_to = OUTSIDE;
  run(BEAT);
  assert_int_equal(q.heard_type, MLFAB__CHALLENGE);
  mlfab__answer answer = {.number = 0, .roles = MLFAB_ROLE_WORKER | MLFAB_ROLE_SERVER, .epoch = 1};
  uint8_t head[MLFAB_HEADER_BYTES + MLFAB__KEYS_META];
  mlfab__header header = {.type = MLFAB__ANSWER};
  header.meta_bytes = mlfab__encode_answer(head + MLFAB_HEADER_BYTES, &answer);
  mlfab__wire_seal(head, &header, NULL);
  uint32_t link = q.last_link;
  post(1, frame_event(link, head, MLFAB_HEADER_BYTES + header.meta_bytes, NULL, 0));
  q.turned = 0;
  q.heard_all = 0;
  run(1000000);
  assert_int_equal(stats(1).frames_refused, 1);
  assert_int_equal(q.heard_all, 0);
  assert_false(q.link[link].up);
  net_open(2, KEY);
  assert_int_equal(join(), 0); /* later calls reach the true one */
  net_close();
}

/* --- keys --- */

static int code_of(const char *one, const char *other, const char *why) {
  mlfab_error error;
  net_begin(9);
  net_open(0, one);
  net_open(1, other);
  for (int i = 0; i < 20000 && mlfab_node_ready(q.node[1], NULL) == 0; i++) turn();
  int code = mlfab_node_ready(q.node[1], &error);
  if (code == 0) { /* waits for node 2 */
    net_open(2, other);
    code = join();
  }
  if (code && why && !strstr(error.text, why)) fail_msg("\"%s\" does not say: %s", error.text, why);
  if (code) assert_null(strstr(error.text, KEY));
  net_close();
  return code;
}

TEST(test_keys_that_differ) {
  static const char two[] = "0123456789abcdef0123456789abcdef,an-old-key-0123456789";
  static const char turned[] = "an-old-key-0123456789,0123456789abcdef0123456789abcdef";
  static const char *const same[][2] = {{KEY, KEY},
                                        /* A change of keys: each process at its own time. */
                                        {two, OLD},
                                        {OLD, two},
                                        {two, KEY},
                                        {KEY, two},
                                        {two, two},
                                        {two, turned}};
  for (size_t i = 0; i < MLFAB__COUNT(same); i++)
    assert_int_equal(code_of(same[i][0], same[i][1], NULL), 0);
  assert_int_equal(code_of(KEY, "", "the caller has none"), MLFAB_ERR_JOB);
  assert_int_equal(code_of("", KEY, "this job has none"), MLFAB_ERR_JOB);
  assert_int_equal(code_of(KEY, OLD, "not this job's"), MLFAB_ERR_JOB);
  assert_int_equal(code_of(two, "a-third-key-0123456789", "not this job's"), MLFAB_ERR_JOB);
}

TEST(test_bad_keys) {
  mlfab__fabric_keys keys;
  const char *why;
  char text[300];
  static const char *const bad[] = {"",
                                    "short",
                                    "fifteen-letters",
                                    "0123456789abcdef,",
                                    "0123456789abcdef,short",
                                    OTHER,
                                    "0123456789abcdef,0123456789abcdef,0123456789abcdef",
                                    "0123456789abcde\n0123456789abcdef",
                                    "0123456789abcdef ",
                                    "0123456789 abcdefgh",
                                    "0123456789abcdef\x7f",
                                    "0123456789abcdef\x80"};
  for (size_t i = 0; i < MLFAB__COUNT(bad); i++) {
    assert_int_equal(mlfab__keys_parse(bad[i], &keys, &why), MLFAB_ERR_CONFIG);
    assert_true(why[0]);
  }
  memset(text, 'a', sizeof text);
  text[128] = 0;
  assert_int_equal(mlfab__keys_parse(text, &keys, &why), 0);
  text[128] = 'a';
  text[129] = 0;
  assert_int_equal(mlfab__keys_parse(text, &keys, &why), MLFAB_ERR_CONFIG);
  assert_int_equal(mlfab__keys_parse("0123456789abcdef,fedcba9876543210", &keys, &why), 0);
  assert_int_equal(keys.count, 2);
  assert_true(keys.name[0] && keys.name[1] && keys.name[0] != keys.name[1]);
  mlfab_config c;
  mlfab_node *node = NULL;
  mlfab_error error;
  mlfab_config_init(&c);
  strcpy(c.key, "too short");
  assert_int_equal(mlfab_node_open(&c, "", 0, &node, &error), MLFAB_ERR_CONFIG);
  assert_non_null(strstr(error.text, "MLFAB_KEY"));
  assert_null(strstr(error.text, "too short"));
  c.key[0] = 0;
  strcpy(c.key_file, "/no/such/file");
  assert_int_equal(mlfab_node_open(&c, "", 0, &node, &error), MLFAB_ERR_CONFIG);
}

/* A caller that is not proven costs at most 256 bytes and 2 s, with any heartbeat, whatever it has said. */
TEST(test_cost_of_strangers) {
  enum { STRANGERS = 60 };
  uint32_t link[STRANGERS];
  mlfab__fabric_keys keys;
  const mlfab__challenge c = challenge_of(0, &keys);
  for (int asks = 0; asks < 2; asks++) {
    begin(10);
    run(4 * BEAT);
    uint64_t before = n.held_bytes, began = q.now;
    for (int i = 0; i < STRANGERS; i++) link[i] = asks ? dial_asking(&c, 0) : dial();
    uint64_t each = (n.held_bytes - before) / STRANGERS;
    if (each > 288) fail_msg("a stranger costs %u bytes", (unsigned)each);
    for (uint64_t end = began + 5 * BEAT - 60000000; q.now < end;) turn();
    run(6 * BEAT);
    for (int i = 0; i < STRANGERS; i++) assert_false(q.link[link[i]].up);
    work();
    net_close();
  }
}

TEST(test_two_seconds) {
  mlfab_config c;
  net_begin(11);
  mlfab_config_init(&c);
  c.workers = 2;
  c.heartbeat_ns = 10000000000u;
  c.timeout_ns = 100000000000u;
  strcpy(c.key, KEY);
  strcpy(c.coordinator, "queue:0");
  assert_int_equal(mlfab_node_open(&c, "queue:0", q.now, &q.node[0], NULL), 0);
  run(BEAT);
  uint32_t link = dial();
  uint64_t began = q.now;
  while (q.link[link].up && q.now < began + 5000000000u) turn();
  assert_in_range(q.now - began, 1500000000u, 2100000000u);
  shut(0);
}

TESTS(NULL, NULL)
