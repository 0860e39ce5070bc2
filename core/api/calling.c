/* calling.c - calls to nodes that have several addresses.
 *
 * A node publishes its addresses, best first. The context skips the addresses that its transports do not reach. It
 * calls one address at a time. If the call fails, or the node calls again before an answer, the next address follows at
 * once, and after the last the first. The states of a token, which names a route of the node:
 *
 *    none --the node calls--> CALLS --UP--> IDLE, this address is called first the next time
 *                             CALLS --DOWN, not the last address--> CALLS the next one
 *                             CALLS --DOWN, the last address--> IDLE, and the node is told why each has failed
 *                             CALLS --the node calls again--> CALLS the next one; all are tried again
 *
 * Invariants. (1) The node sees one call: it gets only the last DOWN, or UP. (2) A DOWN of a transport that does not
 * have the call any more is void. (3) A node with one address needs no entry. (4) A changed list belongs to another
 * process: its first address is called. */
#include "context.h"

#include <errno.h>
#include <stdio.h>

struct mlfab__calling {
  struct mlfab__calling *next;
  uint64_t token;
  uint32_t at, left;  /* number of the address; number of addresses still to try after it */
  uint32_t transport; /* transport that has, or had, the call */
  int calls, told;
  char why[MLFAB__TEXT_MAX];       /* the reasons of this round */
  char list[MLFAB__ADDRESSES_MAX]; /* the addresses */
};

/* Finds the n-th address that some transport reaches. Returns 1, or 0. */
static int calling_address(const mlfab *ctx, const char *list, uint32_t n, char address[256],
                           uint32_t *transport_p) {
  for (const char *at = list; *at;) {
    size_t bytes = strcspn(at, " ");
    if (bytes > 0 && bytes < 256) {
      memcpy(address, at, bytes);
      address[bytes] = 0;
      for (uint32_t t = 0; t < ctx->ntransports; t++) {
        const mlfab__context_transport *transport = &ctx->transports[t];
        if (!transport->table->reach(transport->self, address)) continue;
        if (n-- > 0) break;
        *transport_p = t;
        return 1;
      }
    }
    at += bytes + (at[bytes] == ' ');
  }
  return 0;
}

static uint32_t calling_count(const mlfab *ctx, const char *list) {
  char address[256];
  uint32_t n = 0, transport;
  while (calling_address(ctx, list, n, address, &transport)) n++;
  return n;
}

static void calling_why(struct mlfab__calling *c, const char *address, const char *why) {
  size_t at = strlen(c->why);
  /* Most transports name the address themselves. */
  int named = !address || strstr(why, address) != NULL;
  mlfab__format(c->why + at, sizeof c->why - at, "%s%s%s%.110s", at ? "; " : "",
                named ? "" : address, named ? "" : ": ", why);
}

/* Calls the address that is due; if that fails at once, the next. Returns 0, or the code of the last failure. */
static int calling_go(mlfab *ctx, struct mlfab__calling *c) {
  char address[256];
  int code = MLFAB_ERR_ADDRESS;
  for (;;) {
    if (!calling_address(ctx, c->list, c->at, address, &c->transport)) {
      c->at = 0;
      if (!calling_address(ctx, c->list, 0, address, &c->transport)) return code;
    }
    const mlfab__context_transport *transport = &ctx->transports[c->transport];
    errno = 0;
    code = transport->table->connect(transport->self, address, c->token);
    int number = errno;
    c->calls = code == 0;
    if (code == 0) return 0;
    calling_why(c, address,
                code == MLFAB_ERR_IO && number ? mlfab__reason(number) : mlfab_error_text(code));
    c->at++;
    if (c->left == 0) return code;
    c->left--;
  }
}

MLFAB__INTERNAL int mlfab__calling_begin(mlfab *ctx, const char *list, uint64_t token) {
  char address[256];
  uint32_t transport, n = calling_count(ctx, list);
  struct mlfab__calling *c = ctx->callings;
  while (c && c->token != token) c = c->next;
  if (!c && n > 1 && strlen(list) < sizeof c->list && (c = mlfab__alloc(&ctx->env, sizeof *c))) {
    c->token = token;
    c->next = ctx->callings;
    ctx->callings = c;
  }
  if (!c) { /* one address, or out of memory */
    if (!calling_address(ctx, list, 0, address, &transport)) return MLFAB_ERR_ADDRESS;
    return ctx->transports[transport].table->connect(ctx->transports[transport].self, address,
                                                     token);
  }
  c->why[0] = 0;
  if (strcmp(c->list, list) != 0) {
    snprintf(c->list, sizeof c->list, "%s", list);
    c->at = 0;
    c->calls = 0;
  } else if (c->calls && calling_address(ctx, list, c->at, address, &transport)) {
    calling_why(c, address, "has not answered");
    c->at++;
  }
  c->left = n > 0 ? n - 1 : 0;
  return calling_go(ctx, c);
}

MLFAB__INTERNAL int mlfab__calling_event(mlfab *ctx, uint32_t transport, mlfab_io_event *event) {
  char address[256];
  uint32_t of;
  struct mlfab__calling *c = ctx->callings;
  if (event->token == 0 || (event->kind == MLFAB_IO_DOWN && event->link != 0)) return 0;
  while (c && c->token != event->token) c = c->next;
  if (!c) return 0;
  if (event->kind == MLFAB_IO_UP) {
    if (c->calls && c->why[0] && !c->told && calling_address(ctx, c->list, c->at, address, &of))
      mlfab__log(&ctx->node->env, MLFAB_LOG_WARN, "a node is reached at %s, because %s", address,
                 c->why);
    if (c->why[0]) c->told = 1;
    c->calls = 0;
    return 0;
  }
  if (!c->calls || c->transport != transport) return 1;
  calling_address(ctx, c->list, c->at, address, &of);
  calling_why(c, address, event->text ? event->text : mlfab_error_text(event->code));
  c->calls = 0;
  c->at++;
  if (c->left > 0) {
    c->left--;
    if (calling_go(ctx, c) == 0) return 1;
  }
  event->text = c->why;
  return 0;
}

MLFAB__INTERNAL void mlfab__calling_free(mlfab *ctx) {
  while (ctx->callings) {
    struct mlfab__calling *c = ctx->callings;
    ctx->callings = c->next;
    mlfab__free(&ctx->env, c, sizeof *c);
  }
}
