/* test_reshard_server.c - slices move to a server and away again, frame by frame. The node is server 1 of three; the test
 * plays the other servers and two workers. All bytes arrive, and the receiver refuses wrong frames. After a refused
 * frame the link ends, and everything is sent again from the first byte. */
#include "core/base/env.h"
#include "core/model/image.h"
#include "core/model/layout.h"
#include "core/reshard/reshard_wire.h"
#define SCENE_ENDS close_all()
#include "serving.h"

enum { W = 2, COUNT = 6000, SLICES = 4, BLOCK = 2048, CHUNK = 1024, ATTEMPT = 2, FRAMES = 128 };
enum { FROM = W, TO = W + 3 }; /* peers: the links of servers 0 and 2 to the node, and back */

/* The next bytes of a slice. */
typedef struct part {
  mlfab__reshard_server_bytes head;
  uint32_t bytes;
} part;

static seam s;
static mlfab__env env;
static mlfab__layout layout;
static part parts[FRAMES]; /* the literal move of server 0's slices to the node */
static uint32_t nparts, got, got_sums, wrong_bytes;
static part before;   /* the last part that the node has sent */
static int all_moved; /* the node has the slices of server 0 */
static mlfab__clock_record the_clock;

static int update(void *user, const mlfab_update_info *info, uint32_t tensor, int32_t dtype,
                  uint64_t offset, uint64_t count, void *weights, const void *change) {
  (void)user, (void)info, (void)tensor, (void)dtype, (void)offset, (void)count, (void)weights;
  return change == NULL;
}

/* Weights, states and (in some blocks) a sum, each with its own bytes. */
static uint8_t byte_of(uint32_t kind, uint64_t offset) {
  return (uint8_t)(offset * 31 + kind * 101 + offset / 251);
}

static int has_sum(uint32_t slice, uint64_t offset) { return (slice + offset / BLOCK) % 3 == 1; }

/* Lists the parts of a slice, in the order in which they travel. */
static void list_slice(uint32_t slice, uint32_t states) {
  const mlfab__slice *one = &layout.slices[slice];
  for (uint32_t kind = 0; kind <= MLFAB__IMAGE_SUM; kind++) {
    if (kind > states && kind != MLFAB__IMAGE_SUM) continue;
    for (uint64_t at = 0, n; at < one->bytes; at += n) {
      n = one->bytes - at < CHUNK ? one->bytes - at : CHUNK;
      if (kind == MLFAB__IMAGE_SUM && !has_sum(slice, at)) continue;
      assert_true(nparts < FRAMES);
      parts[nparts++] = (part){{ATTEMPT, slice, kind, at, 5, 5, 0}, (uint32_t)n};
    }
  }
  parts[nparts - 1].head.last = 1;
}

/* The node has told its clock, which is the one that came, or equal. */
static void hear_clock(const seam_heard *heard) {
  mlfab__clock_record clock;
  uint32_t words[MLFAB__RESHARD_SERVER_WORDS_MAX];
  assert_int_equal(mlfab__decode_clock_record(heard->meta, heard->meta_bytes, &clock, words), 0);
  assert_true(clock.attempt > ATTEMPT && clock.words == 1 && words[0] == 0);
  assert_int_equal(clock.consistency.kind, the_clock.consistency.kind);
  assert_true(clock.v_train == 0 && clock.members == 0 && clock.contributors == 0);
}

/* Slices that the node sends: the bytes that came, or the zeros that it had. */
static void hear(seam *of, const seam_heard *heard) {
  mlfab__reshard_server_bytes head;
  if (heard->type != MLFAB__RESHARD_SERVER) { /* as without this function */
    of->hear = NULL;
    seam_heard copy = *heard;
    uint8_t *meta = malloc(heard->meta_bytes + 1);
    assert_true(meta && of->nlog < SEAM_LOG);
    memcpy(meta, heard->meta, heard->meta_bytes);
    copy.meta = meta;
    of->log[of->nlog++] = copy;
    of->hear = hear;
    return;
  }
  if (got == 0) hear_clock(seam_last(of, MLFAB__RESHARD_SERVER_CLOCK, heard->peer));
  assert_int_equal(mlfab__decode_reshard_server_bytes(heard->meta, heard->meta_bytes, &head), 0);
  const mlfab__slice *one = &layout.slices[head.slice];
  int came = all_moved && one->server == 0;
  for (uint32_t i = 0; i < heard->bulk_bytes; i++) {
    uint8_t want = came ? byte_of(head.kind, one->offset + head.offset + i) : 0;
    wrong_bytes += heard->bulk[i] != want;
  }
  if (came) assert_true(head.version == 5 && head.commit == 5);
  /* Without gaps, except between the blocks of sums. */
  int goes_on = before.head.slice == head.slice && before.head.kind == head.kind && got > 0;
  uint64_t next = goes_on ? before.head.offset + before.bytes : 0;
  int block = head.kind == MLFAB__IMAGE_SUM && head.offset % BLOCK == 0;
  wrong_bytes += head.offset != next && !block;
  before = (part){head, heard->bulk_bytes};
  got++;
  got_sums += head.kind == MLFAB__IMAGE_SUM;
}

/* --- links --- */

static uint32_t answer_call(uint32_t i) {
  uint32_t link = ++s.links;
  uint64_t token = s.called[i].token;
  s.called[i] = s.called[--s.ncalled];
  seam_event(&s, (mlfab_io_event){.kind = MLFAB_IO_UP, .link = link, .token = token});
  return link;
}

/* Server 0 or 2 calls the node. */
static void server_calls(uint32_t server) {
  uint32_t p = FROM + server;
  s.peers[p].link = seam_dial(&s, 0, 0);
  SAY(&s, p, HELLO, hello, .node = W + server, .incarnation = 1 + server,
      .roles = MLFAB_ROLE_SERVER, .nonce = 100 + server);
  assert_true(s.peers[p].acked);
}

/* A server answers the call of the node, if it calls. */
static void server_answers(uint32_t server) {
  uint32_t p = TO + server;
  if (s.peers[p].link) return;
  assert_true(s.ncalled > 0);
  s.peers[p].link = answer_call(0);
  SAY(&s, p, HELLO_ACK, hello_ack, .server = server, .model_stands = 1, .epoch = 1,
      .nonce = 100 + server);
}

static void close_all(void) {
  if (!s.node) return;
  mlfab__layout_free(&env, &layout);
  assert_int_equal(env.bytes, 0);
  assert_int_equal(wrong_bytes, 0);
  s.hear = NULL;
  seam_close(&s);
}

/* The node joins; workers and server 0 call it. */
static void open_bare(uint32_t rule_states, int own_rule) {
  mlfab__tensor_info tensor = {0, MLFAB_F32, COUNT};
  mlfab_error error;
  uint8_t list[1024];
  uint32_t bytes = 0;
  close_all();
  seam_init(&s, W);
  s.config.servers = 3;
  s.config.rank = 1;
  s.config.block_bytes = BLOCK;
  s.config.chunk_bytes = CHUNK;
  if (own_rule) s.config.on_update = update;
  seam_node_open(&s);
  uint32_t link = answer_call(0);
  mlfab__welcome welcome = {.incarnation = 2, .nodes = 3, .fresh = 1, .fabric = 1};
  for (uint32_t k = 0; k < 3; k++) {
    mlfab__member_info info = OF(mlfab__member_info, .node = W + k, .roles = MLFAB_ROLE_SERVER,
                                 .incarnation = 1 + k, .nonce = 100 + k, .addresses = "seam:2");
    bytes += mlfab__encode_member_info(list + bytes, (uint32_t)sizeof list - bytes, &info);
  }
  seam_say_on(&s, link, FROM, MLFAB__WELCOME, mlfab__encode_welcome(s.meta, &welcome), list, bytes);
  assert_int_equal(mlfab_node_ready(s.node, NULL), 1);
  for (uint32_t w = 0; w < W; w++) {
    s.peers[w].incarnation = 4 + w;
    seam_hello(&s, w);
  }
  server_calls(0);
  assert_int_equal(mlfab__env_init(&env, NULL), 0);
  assert_int_equal(mlfab__layout_build(&env, &tensor, 1, SLICES, 3, 2, 1 << 30, &layout, &error),
                   0);
  nparts = got = got_sums = wrong_bytes = 0;
  all_moved = 0;
  for (uint32_t i = 0; i < SLICES; i++)
    if (layout.slices[i].server == 0) list_slice(i, rule_states);
}

/* --- words of servers --- */

static mlfab__moved moved(uint32_t server) {
  mlfab__moved m;
  server_answers(server);
  LAST(&s, m, MOVED, moved, TO + server);
  return m;
}

static void say_move(mlfab__move m, const uint32_t *owners, uint32_t less) {
  seam_say(&s, FROM, MLFAB__MOVE, mlfab__encode_move(s.meta, &m, owners) - less);
}

static mlfab__moved move_to(uint32_t owner, uint32_t step, uint32_t attempt) {
  uint32_t owners[SLICES] = {owner, owner, owner, owner};
  say_move((mlfab__move){attempt, step, 0, step == MLFAB__MOVE_PREPARE ? SLICES : 0}, owners, 0);
  return moved(0);
}

static void say_clock(const mlfab__clock_record *clock, uint32_t less) {
  uint32_t words[MLFAB__RESHARD_SERVER_WORDS_MAX] = {0};
  seam_say(&s, FROM, MLFAB__RESHARD_SERVER_CLOCK,
           mlfab__encode_clock_record(s.meta, clock, words) - less);
}

static void say_part_as(const part *p, uint64_t offset, uint32_t less, int ghost) {
  uint8_t bulk[CHUNK + 8] __attribute__((aligned(8)));
  const mlfab__slice *one = &layout.slices[p->head.slice < SLICES ? p->head.slice : 0];
  for (uint32_t i = 0; i < p->bytes; i++) bulk[i] = byte_of(p->head.kind, one->offset + offset + i);
  uint32_t n = mlfab__encode_reshard_server_bytes(s.meta, &p->head) - less;
  seam_bulk(&s, FROM, MLFAB__RESHARD_SERVER, n, ghost || p->bytes == 0 ? NULL : bulk, p->bytes);
}
static void say_part(uint32_t i) { say_part_as(&parts[i], parts[i].head.offset, 0, 0); }

/* The node has refused the last frame, and the link. Server 0 calls again. */
static void refused(const char *what, uint32_t at) {
  if (s.drops != 1 || s.dropped != FROM) fail_msg("%s at %u: drops %u", what, at, s.drops);
  s.drops = 0;
  server_calls(0);
}

/* The model stands, and the node is ready to get the whole of it. */
static void open_with(uint32_t rule, uint32_t states, int own_rule) {
  mlfab__define d = seam_model(MLFAB_SYNC_BSP, SLICES);
  open_bare(states, own_rule);
  d.options.active = 2;
  d.options.optimizer = rule;
  seam_define(&s, 0, &d, 0, MLFAB_F32, COUNT);
  assert_int_equal(seam_defined(&s, 0), 0);
  mlfab__moved m = move_to(1, MLFAB__MOVE_PREPARE, ATTEMPT);
  assert_true(m.step == MLFAB__MOVE_PREPARE && m.code == 0);
  move_to(1, MLFAB__MOVE_SEND, ATTEMPT);
  the_clock = (mlfab__clock_record){
      .attempt = ATTEMPT, .consistency = d.options.consistency, .scale = 1.0, .words = 1};
}
static void open_adam(int own_rule) { open_with(MLFAB_OPTIMIZER_ADAM, 2, own_rule); }

/* Everything from the first byte; then the move takes effect. Another server gets all slices. */
static void complete(uint32_t states, uint32_t next) {
  for (uint32_t i = 0; i < nparts; i++) {
    say_part(i);
    assert_int_equal(s.drops, 0);
    assert_int_equal(moved(0).step, i + 1 < nparts ? MLFAB__MOVE_PREPARE : MLFAB__MOVE_SEND);
  }
  assert_int_equal(moved(0).code, 0);
  assert_int_equal(move_to(1, MLFAB__MOVE_INSTALL, ATTEMPT).step, MLFAB__MOVE_INSTALL);
  assert_int_equal(seam_stats(&s).slices_moved, SLICES / 2);
  seam_hello(&s, 0);
  assert_int_equal(s.peers[0].ack.epoch, ATTEMPT);
  all_moved = 1;
  assert_int_equal(move_to(next, MLFAB__MOVE_PREPARE, ATTEMPT + 1).code, 0);
  s.hear = hear;
  move_to(next, MLFAB__MOVE_SEND, ATTEMPT + 1);
  server_answers(next);
  s.hear = NULL;
  assert_int_equal(got_sums, 4);
  assert_int_equal(got, 4 * 6 * (1 + states) + 4);
}

SCENE(test_all_arrives) {
  static const struct {
    uint32_t rule, states, frames;
  } rules[] = {{MLFAB_OPTIMIZER_SGD, 0, 16},
               {MLFAB_OPTIMIZER_MOMENTUM, 1, 28},
               {MLFAB_OPTIMIZER_ADAM, 2, 40}};
  for (uint32_t i = 0; i < MLFAB__COUNT(rules); i++) {
    open_with(rules[i].rule, rules[i].states, 0);
    assert_int_equal(nparts, rules[i].frames);
    say_clock(&the_clock, 0);
    say_clock(&the_clock, 0); /* a repetition changes nothing */
    complete(rules[i].states, i == 1 ? 2 : 0);
    say_part(0); /* of an attempt that has ended */
    assert_int_equal(s.drops, 0);
  }
}

/* --- refused bytes --- */

static const char *const wrongs[] = {
    "truncated", "no such slice", "kept slice",  "no such kind", "no bytes", "ghosts",
    "gap",       "next kind",     "kind before", "too far",      "too long", "last too early"};

/* Sends a part with one error in it. Returns 0 if the part cannot have that error. */
static int send_wrong(const part *right, const char *wrong) {
#define IS(what) !strcmp(wrong, what)
  part bad = *right;
  mlfab__reshard_server_bytes *head = &bad.head;
  const mlfab__slice *slice = &layout.slices[head->slice];
  int sum = head->kind == MLFAB__IMAGE_SUM;
  uint32_t kept = 0;
  while (layout.slices[kept].server != 1) kept++;
  if (IS("no such slice")) head->slice = SLICES;
  if (IS("kept slice")) head->slice = kept;
  if (IS("no such kind")) head->kind = MLFAB__IMAGE_SUM + 1;
  if (IS("no bytes")) bad.bytes = 0;
  if (IS("gap") && (sum || head->offset + 4 + bad.bytes > slice->bytes)) return 0;
  if (IS("gap")) head->offset += 4;
  if (IS("next kind") && (sum || (head->kind > 0 && head->offset == 0))) return 0;
  if (IS("next kind")) head->kind++, head->offset = 0;
  if (IS("kind before") && (head->kind == 0 || head->offset == 0)) return 0;
  if (IS("kind before")) head->kind--;
  if ((IS("too far") || IS("too long")) && !sum) return 0;
  if (IS("too far")) head->offset = slice->bytes + BLOCK;
  if (IS("too long")) head->offset = slice->bytes - bad.bytes + 4;
  if (IS("last too early") && (head->last || head->kind >= MLFAB__IMAGE_STATE1)) return 0;
  if (IS("last too early")) head->last = 1;
  say_part_as(&bad, right->head.offset, IS("truncated"), IS("ghosts"));
  return 1;
}

/* Replaces each frame by a wrong one: nothing of it is kept, and the repeated attempt succeeds. */
SCENE(test_wrong_bytes) {
  for (uint32_t k = 0; k < MLFAB__COUNT(wrongs); k++) {
    uint32_t tried = 0, n = 1;
    for (uint32_t at = 0; at < n; at++) {
      open_adam(0);
      n = nparts;
      say_clock(&the_clock, 0);
      for (uint32_t i = 0; i < at; i++) say_part(i);
      if (send_wrong(&parts[at], wrongs[k])) {
        refused(wrongs[k], at);
        tried++;
      }
      complete(2, 0);
    }
    assert_true(tried > 0);
  }
}

/* A server whose callback applies updates has no states, and a server without a clock for the slices
 * refuses them. */
SCENE(test_states_of_another_rule) {
  open_adam(1);
  say_part(0);
  refused("a part without a clock", 0);
  say_clock(&the_clock, 0);
  uint32_t i = 0;
  for (; parts[i].head.kind == 0; i++) say_part(i);
  assert_int_equal(s.drops, 0);
  say_part(i);
  refused("a state", i);
}

SCENE(test_wrong_clocks) {
  open_adam(0);
  for (uint32_t i = 0; i < 3; i++) {
    mlfab__clock_record bad = the_clock;
    if (i == 1) bad.words++;
    if (i == 2) bad.consistency.kind = 99;
    say_clock(&bad, i == 0);
    refused("a clock", i);
  }
  mlfab__clock_record other = the_clock;
  other.attempt++; /* another attempt: ignored */
  say_clock(&other, 0);
  assert_int_equal(s.drops, 0);
  say_part(0);
  refused("a part without a clock", 0);
  SAY(&s, FROM, BARRIER, barrier, .number = 1);
  refused("a frame that no server sends", 0);
  say_clock(&the_clock, 0);
  complete(2, 0);
}

/* --- messages of server 0 and of others --- */

static void say_moved(uint32_t from, uint32_t server, uint32_t attempt, uint32_t step,
                      uint32_t less) {
  mlfab__moved m = {.attempt = attempt, .step = step, .server = server};
  seam_say(&s, FROM + from, MLFAB__MOVED, mlfab__encode_moved(s.meta, &m) - less);
}

SCENE(test_wrong_words) {
  static const uint32_t good[SLICES + 1] = {1, 1, 1, 1, 1}, bad[SLICES] = {1, 1, 1, 3};
  static const struct {
    mlfab__move move;
    const uint32_t *owners;
    uint32_t less;
  } moves[] = {{{0, MLFAB__MOVE_ABORT, 0, 0}, good, 0},
               {{9, MLFAB__MOVE_ABORT, 0, 0}, good, 1},
               {{9, MLFAB__MOVE_PREPARE, 0, SLICES}, bad, 0},
               {{9, MLFAB__MOVE_PREPARE, 0, SLICES - 1}, good, 0},
               {{9, MLFAB__MOVE_PREPARE, 0, SLICES + 1}, good, 0},
               {{9, 77, 0, 0}, good, 0},
               {{ATTEMPT, MLFAB__MOVE_INSTALL, 0, 0}, good, 0}}; /* not everything has arrived */
  static const uint32_t told[][3] = {{0, ATTEMPT, 0}, {2, 0, 0}, {2, ATTEMPT, 1}};
  open_adam(0);
  for (uint32_t i = 0; i < MLFAB__COUNT(moves); i++) {
    say_move(moves[i].move, moves[i].owners, moves[i].less);
    refused("a move", i);
  }
  say_moved(0, 0, ATTEMPT, MLFAB__MOVE_ABORT, 0); /* server 0 tells nobody */
  refused("server 0's word", 0);
  for (uint32_t i = 0; i < 4; i++) {
    server_calls(2);
    if (i < 3) say_moved(2, told[i][0], told[i][1], MLFAB__MOVE_ABORT, told[i][2]);
    /* Server 0 leads: others cannot decide. */
    if (i == 3) say_moved(2, 2, ATTEMPT, MLFAB__MOVE_ABORT, 0);
    assert_int_equal(s.drops, i < 3);
    s.drops = 0;
  }
  say_clock(&the_clock, 0);
  complete(2, 0);
}

/* After an abort everything is as before, and the next attempt succeeds. */
SCENE(test_abort) {
  open_adam(0);
  say_clock(&the_clock, 0);
  for (uint32_t i = 0; i < nparts; i++) say_part(i);
  assert_int_equal(move_to(1, MLFAB__MOVE_ABORT, ATTEMPT).step, MLFAB__MOVE_ABORT);
  seam_hello(&s, 0);
  assert_int_equal(s.peers[0].ack.epoch, 1); /* nothing moves */
  seam_forget(&s);
  /* late: the answer is repeated */
  assert_int_equal(move_to(1, MLFAB__MOVE_SEND, ATTEMPT).step, MLFAB__MOVE_ABORT);
  assert_int_equal(move_to(1, MLFAB__MOVE_INSTALL, ATTEMPT + 1).code, MLFAB_ERR_STATE);
  mlfab__moved m = move_to(0, MLFAB__MOVE_PREPARE, ATTEMPT + 2);
  assert_true(m.attempt == ATTEMPT + 2 && m.code == 0);
  seam_hello(&s, 0);
  assert_int_equal(s.peers[0].ack.epoch, 0);
  s.hear = hear;
  move_to(0, MLFAB__MOVE_SEND, ATTEMPT + 2);
  s.hear = NULL;
  assert_int_equal(got, 2 * 6 * 3); /* the two slices that it had */
}

/* --- a server that joins: ADOPT --- */

static void adopt(mlfab__adopt a, const uint32_t *words, uint32_t tables) {
  uint8_t table[2 * MLFAB__TENSOR_INFO_BYTES] __attribute__((aligned(8))) = {0};
  mlfab__tensor_info info = {0, MLFAB_F32, COUNT};
  mlfab__encode_tensor_info(table, &info);
  seam_bulk(&s, FROM, MLFAB__ADOPT, mlfab__encode_adopt(s.meta, &a, words), table,
            tables * MLFAB__TENSOR_INFO_BYTES);
}

SCENE(test_adopt) {
  /* Worker 1 counts, worker 0 does not. */
  uint32_t words[SLICES + 2] = {0, 0, 0, 0, 2}, own[SLICES + 2] = {1}, beyond[SLICES + 2] = {3};
  mlfab__define d = seam_model(MLFAB_SYNC_BSP, SLICES);
  mlfab__adopt good = OF(mlfab__adopt, .attempt = ATTEMPT, .slices = SLICES, .restored = 7,
                         .packets = 1, .tensors = 1, .options = d.options, .words = SLICES + 1);
  good.options.active = 1;
  open_bare(0, 0);
  for (uint32_t k = 0; k < 8; k++) {
    mlfab__adopt bad = good;
    if (k == 0) bad.attempt = 0;
    if (k == 1) bad.slices = 0;
    if (k == 2) bad.words = SLICES;
    if (k == 3) bad.words = SLICES + 2;
    if (k == 4) bad.slices = SLICES + 1;
    adopt(bad, k == 5 ? own : k == 6 ? beyond : words, k == 7 ? 2 : 1);
    refused("adopt", k);
  }
  assert_int_equal(s.peers[0].ack.model_stands, 0);
  /* It names the reason why it cannot adopt a model. */
  good.options.consistency.kind = MLFAB_SYNC_USER;
  adopt(good, words, 1);
  mlfab__moved m = moved(0);
  assert_true(m.attempt == ATTEMPT && m.code == MLFAB_ERR_UNSUPPORTED);
  assert_int_equal(m.step, MLFAB__MOVE_PREPARE);
  good.options.consistency.kind = MLFAB_SYNC_BSP;
  good.attempt++;
  seam_hello(&s, 0);
  assert_int_equal(s.peers[0].ack.model_stands, 0);
  adopt(good, words, 1);
  for (uint32_t w = 0; w < W; w++) {
    mlfab__define_ack ack;
    seam_hello(&s, w);
    assert_int_equal(s.peers[w].ack.model_stands, 1);
    assert_int_equal(s.peers[w].ack.guest, w == 0);
    seam_define(&s, w, &d, 0, MLFAB_F32, COUNT);
    LAST(&s, ack, DEFINE_ACK, define_ack, w);
    assert_true(ack.code == 0 && ack.restored == 7);
  }
  /* A server that has lost server 0 asks about a move of which this one knows nothing: it cannot say that it
   * has failed. */
  server_calls(2);
  say_moved(2, 2, ATTEMPT + 5, MLFAB__MOVE_SEND, 0);
  server_answers(2); /* now there is a link for the answer */
  say_moved(2, 2, ATTEMPT + 5, MLFAB__MOVE_SEND, 0);
  assert_int_equal(s.drops, 0);
  m = moved(2);
  assert_true(m.attempt == ATTEMPT + 5 && m.step == MLFAB__MOVE_PREPARE);
  /* The move that it was told of: it prepares, once. */
  m = move_to(1, MLFAB__MOVE_PREPARE, ATTEMPT + 1);
  assert_true(m.attempt == ATTEMPT + 1 && m.code == 0);
  adopt(good, words, 1); /* repeated on another link */
  assert_int_equal(s.drops, 0);
  seam_hello(&s, 1);
  assert_int_equal(s.peers[1].ack.epoch, 0); /* it moves */
}
