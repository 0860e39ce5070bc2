/* resident.c - a server's model in memory of a device. memory.h describes the functions.
 *
 * For: queueing the server's work on blocks behind copies from the host, and copies that the host can read (shadows).
 * Store and server decide which block is written when.
 *
 * The host multiplies arriving values by their scale and checks them, in the pass that copies them to pinned memory. So
 * a NaN is found before the commit, and the device never has to report one. The device then adds products with a factor
 * of 1, which gives the bits of the host's kernels.
 *
 * A shadow is the copy of one block in pinned memory. Its states:
 *
 *    FREE --lend--> COPIES (its mark is not reached) --> THERE --the block has no reference any more--> FREE
 *                     \--the same, before the copy has ended------------------------------------------^
 *
 * Invariants. (1) All work on blocks is in one queue. A copy to the host begins after the work queued before its
 * request. So a block may be given up, taken and written again while it is copied; the copy then has no block. (2) A
 * shadow belongs to at most one block, and a block with references is never written. If a shadow is used again while
 * its last copy is under way, the new copy is behind that: they have their own queue. (3) The shadows are as many as
 * the blocks that pulls read at one time: at most one for each present or pinned block. (4) If a function of the device
 * (but `take` and `pin`) fails, the server crashes and gives it no more work. */
#include "resident.h"

#include <stdio.h>

typedef struct resident_shadow {
  struct resident_shadow *next; /* FREE: the next free shadow */
  uint8_t *at;
  uint64_t bytes;
  void *mark; /* mark of its last copy, until that is known to be over */
} resident_shadow;

enum { RESIDENT_FAILED = 1, RESIDENT_FOREIGN = 2 }; /* FOREIGN: the device of another process */

typedef struct resident {
  mlfab__memory base;
  mlfab_node *node;
  mlfab__server *server;
  const mlfab_device *device;
  void *self;
  uint8_t *products;       /* in device memory: MLFAB_DEVICE_STAGE bytes */
  resident_shadow *unused; /* of one size */
  uint8_t **pool; /* memory that was given back; taking memory from the device may make it wait */
  uint32_t npool, pool_room;
  uint64_t pool_bytes; /* of each */
  int broken;          /* RESIDENT_*, or 0 */
} resident;

static resident *resident_of(mlfab__memory *memory) { return (resident *)(void *)memory; }

static void resident_break(resident *r, const char *what, int number) {
  char text[MLFAB__TEXT_MAX];
  if (r->broken) return;
  snprintf(text, sizeof text, "server %u: its model is on a device, which has failed: %s: %s",
           r->server->number, what, r->device->text(r->self, number));
  r->broken = RESIDENT_FAILED;
  mlfab__node_crash(r->node, MLFAB_ERR_DEVICE, text);
}

/* Returns 1 if the function of the device failed with this number. */
static int resident_failed(resident *r, const char *what, int number) {
  if (number) resident_break(r, what, number);
  return r->broken;
}

/* --- blocks --- */

static void resident_empty_pool(resident *r) {
  while (r->npool > 0 && !r->broken) r->device->give(r->self, r->pool[--r->npool]);
  r->npool = 0;
}

/* Taken memory has the size of the model's blocks. Given memory may come from an earlier model. */
static uint8_t *resident_take(mlfab__memory *memory, uint64_t bytes) {
  resident *r = resident_of(memory);
  void *at = NULL;
  if (r->broken) return NULL;
  if (bytes != r->pool_bytes) resident_empty_pool(r);
  r->pool_bytes = bytes;
  if (r->npool > 0) return r->pool[--r->npool];
  return r->device->take(r->self, bytes, &at) ? NULL : at;
}

static void resident_give(mlfab__memory *memory, uint8_t *at, uint64_t bytes) {
  resident *r = resident_of(memory);
  if (r->broken) return;
  uint8_t **pool = bytes == r->pool_bytes ? mlfab__grow(r->server->env, r->pool, &r->pool_room,
                                                        (uint64_t)r->npool + 1, sizeof *pool)
                                          : NULL;
  if (!pool) {
    r->device->give(r->self, at);
    return;
  }
  r->pool = pool;
  r->pool[r->npool++] = at;
}

static void resident_zero(mlfab__memory *memory, uint8_t *to, uint64_t bytes) {
  resident *r = resident_of(memory);
  if (!r->broken)
    resident_failed(r, "setting a block to zero", r->device->zero(r->self, to, bytes));
}

static void resident_copy(mlfab__memory *memory, uint8_t *to, const uint8_t *from, uint64_t bytes) {
  resident *r = resident_of(memory);
  if (!r->broken)
    resident_failed(r, "copying a block",
                    r->device->copy(r->self, MLFAB_DEVICE_FROM_HOST, to, from, bytes));
}

static void resident_see(mlfab__memory *memory, uint8_t *to, const uint8_t *from, uint64_t bytes) {
  resident *r = resident_of(memory);
  if (!r->broken)
    resident_failed(r, "copying to the host", r->device->fetch(r->self, to, from, bytes));
  if (r->broken) memset(to, 0, bytes);
}

/* --- data from the host --- */

/* Pinned memory for up to MLFAB_DEVICE_STAGE bytes, or NULL. */
static uint8_t *resident_stage(resident *r) {
  void *at = NULL;
  if (r->broken || resident_failed(r, "waiting for earlier copies", r->device->stage(r->self, &at)))
    return NULL;
  return at;
}

/* Sends bytes from pinned memory. */
static void resident_send(resident *r, uint8_t *to, const uint8_t *from, uint64_t bytes) {
  resident_failed(r, "copying from the host",
                  r->device->copy(r->self, MLFAB_DEVICE_FROM_HOST, to, from, bytes));
}

static void resident_write(mlfab__memory *memory, uint8_t *to, const uint8_t *from,
                           uint64_t bytes) {
  resident *r = resident_of(memory);
  for (uint64_t n; bytes > 0; to += n, from += n, bytes -= n) {
    uint8_t *stage = resident_stage(r);
    if (!stage) return;
    n = mlfab__min(bytes, MLFAB_DEVICE_STAGE);
    memcpy(stage, from, n);
    resident_send(r, to, stage, n);
  }
}

static int resident_add(mlfab__memory *memory, uint32_t kernels, int dtype, uint8_t *to,
                        const uint8_t *w, const uint8_t *u, double scale, uint64_t n) {
  resident *r = resident_of(memory);
  const uint64_t width = mlfab__dtype_bytes(dtype), most = MLFAB_DEVICE_STAGE / width;
  for (uint64_t at = 0, count; at < n; at += count) {
    uint8_t *stage = resident_stage(r);
    if (!stage) return 1;
    count = mlfab__min(n - at, most);
    const uint64_t skip = at * width, bytes = count * width;
    if (!mlfab__kernel_add_by(kernels, dtype, stage, NULL, u + skip, scale, count, 0)) return 0;
    resident_send(r, w ? r->products : to + skip, stage, bytes);
    if (r->broken || !w) continue;
    resident_failed(r, "adding an update",
                    r->device->add(r->self, dtype, to + skip, w + skip, r->products, 1.0, count));
  }
  return 1;
}

/* --- arithmetic on blocks --- */

static void resident_scale(mlfab__memory *memory, int dtype, uint8_t *data, double by, uint64_t n) {
  resident *r = resident_of(memory);
  if (!r->broken)
    resident_failed(r, "scaling a sum", r->device->add(r->self, dtype, data, NULL, data, by, n));
}

static void resident_step(mlfab__memory *memory, const mlfab__optimizer *optimizer,
                          const mlfab__optimizer_step *step, int dtype, uint8_t *dst,
                          const uint8_t *w, const uint8_t *u, uint8_t *s0, uint8_t *s1,
                          uint64_t n) {
  resident *r = resident_of(memory);
  const mlfab_device_rule rule = {.kind = optimizer->kind,
                                  .gamma = optimizer->gamma,
                                  .adadelay_c = optimizer->adadelay_c,
                                  .beta1 = optimizer->beta1,
                                  .beta2 = optimizer->beta2,
                                  .epsilon = optimizer->epsilon,
                                  .weight_decay = optimizer->weight_decay,
                                  .scale = step->scale,
                                  .t = step->t,
                                  .delay = step->delay};
  if (!r->broken)
    resident_failed(r, "the optimizer's step",
                    r->device->step(r->self, &rule, dtype, dst, w, u, s0, s1, n));
}

/* --- shadows --- */

/* Waits for the copies to the host that are under way, by a look at any memory (`products`). */
static void resident_drain(resident *r) {
  uint8_t byte;
  for (resident_shadow *s = r->unused; s && !r->broken; s = s->next) {
    if (!s->mark) continue;
    int number = r->device->after(r->self, MLFAB_DEVICE_FROM_HOST, s->mark);
    r->device->drop(r->self, s->mark);
    s->mark = NULL;
    if (!number) number = r->device->fetch(r->self, &byte, r->products, 1);
    resident_failed(r, "waiting for copies to the host", number);
  }
}

static void resident_unpin(resident *r) {
  while (r->unused) {
    resident_shadow *s = r->unused;
    r->unused = s->next;
    if (s->mark && r->broken != RESIDENT_FOREIGN) r->device->drop(r->self, s->mark);
    /* Memory that a broken device may still write to stays pinned. */
    if (!r->broken) r->device->unpin(r->self, s->at);
    mlfab__free(r->server->env, s, sizeof *s);
  }
}

static resident_shadow *resident_shadow_get(resident *r, uint64_t bytes) {
  resident_shadow *s = r->unused;
  void *at = NULL;
  if (s && s->bytes != bytes) { /* of an earlier model */
    resident_drain(r);
    resident_unpin(r);
    if (r->broken) return NULL;
    s = NULL;
  }
  if (s) {
    r->unused = s->next;
    return s;
  }
  s = mlfab__alloc(r->server->env, sizeof *s);
  if (!s || r->device->pin(r->self, bytes, &at)) {
    mlfab__free(r->server->env, s, sizeof *s);
    return NULL;
  }
  s->at = at;
  s->bytes = bytes;
  return s;
}

/* Begins to copy a block, behind all queued work on the block. */
static int resident_shadow_copy(resident *r, resident_shadow *s, const uint8_t *from,
                                uint64_t bytes) {
  const mlfab_device *d = r->device;
  void *work = NULL;
  if (s->mark) d->drop(r->self, s->mark);
  s->mark = NULL;
  int number = d->mark(r->self, MLFAB_DEVICE_FROM_HOST, &work);
  if (!number) number = d->after(r->self, MLFAB_DEVICE_TO_HOST, work);
  if (work) d->drop(r->self, work);
  if (!number) number = d->copy(r->self, MLFAB_DEVICE_TO_HOST, s->at, from, bytes);
  if (!number) number = d->mark(r->self, MLFAB_DEVICE_TO_HOST, &s->mark);
  return resident_failed(r, "copying a block to the host", number);
}

static int resident_lend(mlfab__memory *memory, mlfab__block *block, uint64_t bytes,
                         const uint8_t **at_p) {
  resident *r = resident_of(memory);
  resident_shadow *s = block->shadow;
  if (r->broken) return 0;
  if (!s) {
    s = resident_shadow_get(r, bytes);
    if (!s) return MLFAB_ERR_MEMORY;
    block->shadow = s;
    (void)resident_shadow_copy(r, s, block->data, bytes);
    return 0;
  }
  int reached = s->mark ? r->device->poll(r->self, s->mark) : 1;
  if (reached < 0) resident_break(r, "copying a block to the host", -reached);
  if (reached <= 0) return 0;
  if (s->mark) r->device->drop(r->self, s->mark);
  s->mark = NULL;
  *at_p = s->at;
  return 1;
}

static void resident_forget(mlfab__memory *memory, mlfab__block *block) {
  resident *r = resident_of(memory);
  resident_shadow *s = block->shadow;
  block->shadow = NULL;
  s->next = r->unused;
  r->unused = s;
}

/* --- beginning and end --- */

static void resident_unmake(mlfab__server *server, resident *r) {
  mlfab__free_aligned(server->env, server->window, MLFAB_BULK_MAX);
  server->window = NULL;
  if (r) mlfab__free(server->env, r->pool, r->pool_room * sizeof *r->pool);
  mlfab__free(server->env, r, sizeof *r);
}

static void resident_free(mlfab__memory *memory) {
  resident *r = resident_of(memory);
  resident_drain(r);
  resident_unpin(r);
  resident_empty_pool(r);
  if (!r->broken) r->device->give(r->self, r->products);
  resident_unmake(r->server, r);
}

static void resident_disown(mlfab__memory *memory) {
  resident_of(memory)->broken = RESIDENT_FOREIGN;
}

/* Called if there is no pinned memory to copy the pull's bytes to. */
static void resident_poor(mlfab__server *server, mlfab__server_pull *pull) {
  if (pull->request &
      MLFAB__SPREAD_BIT) { /* the policy notices, and answers those that wait for it */
    mlfab__serve_end(server, pull);
    return;
  }
  mlfab__serve_fail(server, pull->worker, pull->request, MLFAB_ERR_MEMORY,
                    "the server is out of pinned memory for copies from its device");
  mlfab__serve_over(server, pull, MLFAB_ERR_MEMORY);
}

/* Asks again for pulls that wait for copies, or that could not get one. */
static void resident_again(mlfab__memory *memory) {
  mlfab__server *server = resident_of(memory)->server;
  mlfab__serve_walk walk = {NULL, 0};
  server->serve.copies = 0;
  for (mlfab__server_pull *pull; (pull = mlfab__serve_each(server, &walk)) != NULL;) {
    if (pull->poor)
      resident_poor(server, pull);
    else if (mlfab__server_goes(pull))
      server->port.ready(server->port.self, pull->worker);
  }
}

static const mlfab__memory_table resident_table = {
    resident_take,   resident_give,  resident_zero,   resident_copy, resident_write,
    resident_see,    resident_add,   resident_scale,  resident_step, resident_lend,
    resident_forget, resident_again, resident_disown, resident_free};

/* The first function that is missing, or NULL. */
static const char *resident_missing(const mlfab_device *d) {
  if (d->size < sizeof *d) return "size";
  if (!d->pin) return "pin";
  if (!d->unpin) return "unpin";
  if (!d->after) return "after";
  if (!d->copy) return "copy";
  if (!d->mark) return "mark";
  if (!d->poll) return "poll";
  if (!d->drop) return "drop";
  if (!d->text) return "text";
  if (!d->take) return "take";
  if (!d->give) return "give";
  if (!d->stage) return "stage";
  if (!d->fetch) return "fetch";
  if (!d->zero) return "zero";
  if (!d->add) return "add";
  return d->step ? NULL : "step";
}

MLFAB__INTERNAL int mlfab__resident_attach(mlfab_node *node, mlfab__server *server,
                                           mlfab_error *error) {
  const mlfab_device *device = server->config->device;
  const char *missing = resident_missing(device);
  void *products = NULL;
  if (missing)
    return MLFAB__FAIL(error, MLFAB_ERR_CONFIG,
                       "configuration: device.%s is not set, so it can hold no model", missing);
  resident *r = mlfab__alloc(server->env, sizeof *r);
  server->window = mlfab__alloc_aligned(server->env, MLFAB_BULK_MAX);
  if (!r || !server->window) {
    resident_unmake(server, r);
    return MLFAB__FAIL(error, MLFAB_ERR_MEMORY, "out of memory for a model on a device");
  }
  r->base.on = &resident_table;
  r->node = node;
  r->server = server;
  r->device = device;
  r->self = server->config->device_self;
  int number = device->take(r->self, MLFAB_DEVICE_STAGE, &products);
  if (number) {
    resident_unmake(server, r);
    return MLFAB__FAIL(error, MLFAB_ERR_DEVICE, "configuration: device: %s",
                       device->text(server->config->device_self, number));
  }
  r->products = products;
  server->memory = &r->base;
  return 0;
}
