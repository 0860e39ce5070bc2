/* test_calling.c - calls to nodes with several addresses, over two transports that do what the test says. */
#include "core/api/context.h"
#include "core/node/node.h"

#include <stdio.h>
#include "../testing.h"

enum { TOKEN = 9 };

static struct {
  char called[256]; /* the last address, and how often there was a call */
  uint32_t calls;
  int code; /* of the next calls of transport 0 */
  char line[512];
  uint32_t lines;
} f;

static mlfab ctx;
static mlfab_node node;

static int reach_a(void *self, const char *address) { return (void)self, address[0] == 'a'; }
static int reach_b(void *self, const char *address) { return (void)self, address[0] == 'b'; }

static int calls(void *self, const char *address, uint64_t token) {
  assert_int_equal(token, TOKEN);
  snprintf(f.called, sizeof f.called, "%s", address);
  f.calls++;
  return self == &f ? f.code : 0;
}

static void logs(void *user, int level, const char *line) {
  (void)user;
  (void)level;
  f.lines++;
  snprintf(f.line, sizeof f.line, "%s", line);
}

static int setup(void **state) {
  static const mlfab_transport a = {.name = "a", .reach = reach_a, .connect = calls};
  static const mlfab_transport b = {.name = "b", .reach = reach_b, .connect = calls};
  (void)state;
  memset(&f, 0, sizeof f);
  memset(&ctx, 0, sizeof ctx);
  memset(&node, 0, sizeof node);
  assert_int_equal(mlfab__env_init(&ctx.env, NULL), 0);
  node.env = ctx.env;
  node.env.hooks.log = logs;
  node.env.hooks.log_level = MLFAB_LOG_WARN;
  ctx.node = &node;
  ctx.transports[0] = (mlfab__context_transport){.table = &a, .self = &f};
  ctx.transports[1] = (mlfab__context_transport){.table = &b, .self = &node};
  ctx.ntransports = 2;
  return 0;
}

static int teardown(void **state) {
  (void)state;
  mlfab__calling_free(&ctx);
  return 0;
}

static void begins(const char *list, const char *called) {
  uint32_t before = f.calls;
  assert_int_equal(mlfab__calling_begin(&ctx, list, TOKEN), 0);
  assert_string_equal(f.called, called);
  assert_true(f.calls > before);
}

/* An event of a transport: is the node told, and which address is called then? NULL: none. */
static mlfab_io_event event(uint32_t kind, uint32_t t, const char *why, int told,
                            const char *called) {
  mlfab_io_event e = {.kind = kind, .token = TOKEN, .text = why, .code = MLFAB_ERR_PEER_CLOSED};
  uint32_t before = f.calls;
  if (kind == MLFAB_IO_UP) e.link = 5;
  assert_int_equal(mlfab__calling_event(&ctx, t, &e), !told);
  assert_int_equal(f.calls, before + (called != NULL));
  if (called) assert_string_equal(f.called, called);
  return e;
}

TEST_WITH(test_one_after_the_other, setup, teardown) {
  begins("x:0 a:1 b:2 b:3", "a:1"); /* nothing reaches x */
  (void)event(MLFAB_IO_DOWN, 0, "not at a:1", 0, "b:2");
  (void)event(MLFAB_IO_DOWN, 0, "a late word", 0, NULL); /* a has no call any more */
  (void)event(MLFAB_IO_DOWN, 1, "refused", 0, "b:3");
  mlfab_io_event e = event(MLFAB_IO_DOWN, 1, "refused, too", 1, NULL);
  assert_string_equal(e.text, "not at a:1; b:2: refused; b:3: refused, too");
  begins("x:0 a:1 b:2 b:3", "a:1"); /* and around */
}

/* The address that has worked is called first the next time; one line says why it is not the best one. */
TEST_WITH(test_what_has_worked, setup, teardown) {
  begins("a:1 b:2", "a:1");
  (void)event(MLFAB_IO_DOWN, 0, "no memory to share", 0, "b:2");
  for (int i = 0; i < 3; i++) {
    (void)event(MLFAB_IO_UP, 1, NULL, 1, NULL);
    begins("a:1 b:2", "b:2");
  }
  assert_int_equal(f.lines, 1);
  assert_string_equal(f.line, "a node is reached at b:2, because a:1: no memory to share");
  (void)event(MLFAB_IO_DOWN, 1, "refused", 0, "a:1");
  (void)event(MLFAB_IO_UP, 0, NULL, 1, NULL);
  begins("a:7 b:8", "a:7"); /* another process */
}

/* The node calls again because nobody has answered. */
TEST_WITH(test_no_answer, setup, teardown) {
  begins("a:1 b:2", "a:1");
  begins("a:1 b:2", "b:2");
  mlfab_io_event e = event(MLFAB_IO_DOWN, 1, "refused", 0, "a:1");
  (void)e;
  e = event(MLFAB_IO_DOWN, 0, "gone", 1, NULL);
  assert_string_equal(e.text, "a:1: has not answered; b:2: refused; a:1: gone");
}

TEST_WITH(test_calls_that_fail_at_once, setup, teardown) {
  f.code = MLFAB_ERR_INSECURE;
  begins("a:1 b:2", "b:2");
  assert_int_equal(mlfab__calling_begin(&ctx, "a:1 a:2", TOKEN), MLFAB_ERR_INSECURE);
  assert_int_equal(mlfab__calling_begin(&ctx, "x:1", TOKEN), MLFAB_ERR_ADDRESS);
  assert_int_equal(mlfab__calling_begin(&ctx, "", TOKEN), MLFAB_ERR_ADDRESS);
}

/* A node with one address: its events are the node's. */
TEST_WITH(test_one_address, setup, teardown) {
  begins("b:2", "b:2");
  assert_null(ctx.callings);
  mlfab_io_event e = event(MLFAB_IO_DOWN, 1, "refused", 1, NULL);
  assert_string_equal(e.text, "refused");
}

TESTS(NULL, NULL)
