/* member.c - barrier and broadcast. See member.h. */
#include "member.h"

#include <stdio.h>

/* --- server 0 --- */

MLFAB__INTERNAL int mlfab__host_init(mlfab__host *host, mlfab__env *env, const mlfab_config *config,
                                     const mlfab__port *port) {
  memset(host, 0, sizeof *host);
  host->env = env;
  host->config = config;
  host->port = *port;
  host->workers = config->workers;
  host->missing = MLFAB_NO_RANK;
  host->attendees = mlfab__alloc_array(env, host->workers, sizeof *host->attendees);
  return host->attendees ? 0 : MLFAB_ERR_MEMORY;
}

MLFAB__INTERNAL void mlfab__host_free(mlfab__host *host) {
  if (!host->env) return;
  mlfab__free(host->env, host->attendees, host->workers * sizeof *host->attendees);
  mlfab__free(host->env, host->data, host->bytes);
  memset(host, 0, sizeof *host);
}

static void host_barrier_post(mlfab__host *host, uint32_t worker, uint64_t number) {
  mlfab__barrier barrier = {number};
  uint8_t meta[16];
  host->port.post(host->port.self, worker, MLFAB__BARRIER_DONE, meta,
                  mlfab__encode_barrier(meta, &barrier));
}

/* Releases the barrier when nobody is missing; tells who is: a newcomer, and all when it
 * changes. */
static void host_barrier_check(mlfab__host *host, uint32_t newcomer) {
  int32_t missing = MLFAB_NO_RANK;
  uint32_t waiting = 0;
  for (uint32_t w = 0; w < host->workers; w++) {
    const mlfab__attendee *a = &host->attendees[w];
    if (a->barrier_waiting) {
      waiting++;
    } else if (!a->gone && !a->done && missing == MLFAB_NO_RANK) {
      missing = (int32_t)w;
    }
  }
  if (waiting == 0) return;
  if (MLFAB__PLANTED(7)) missing = MLFAB_NO_RANK;
  if (missing == MLFAB_NO_RANK) host->barriers++;
  for (uint32_t w = 0; w < host->workers; w++) {
    mlfab__attendee *a = &host->attendees[w];
    if (!a->barrier_waiting) continue;
    if (missing != MLFAB_NO_RANK) {
      if (missing == host->missing && w != newcomer) continue;
      host_barrier_post(host, w, MLFAB__BARRIER_MISSING | (uint32_t)missing);
    } else {
      host_barrier_post(host, w, a->barrier_waiting - a->barrier_base);
      a->barrier_waiting = 0;
    }
  }
  host->missing = missing;
}

static void host_barrier(mlfab__host *host, uint32_t worker, uint64_t number) {
  mlfab__attendee *a = &host->attendees[worker];
  uint64_t all = a->barrier_base + number;
  if (all <= host->barriers) {
    host_barrier_post(host, worker, number);
    return;
  }
  a->barrier_waiting = all;
  host_barrier_check(host, worker);
}

static void host_bcast_post(mlfab__host *host, uint32_t worker, uint64_t number, uint64_t offset,
                            int32_t code, int32_t rank) {
  mlfab__bcast bcast = {number, host->bytes, offset, host->root, code, rank};
  if (code == MLFAB_ERR_SHAPE && (int32_t)worker != rank) {
    /* Each is told what the other side calls it with. */
    bcast.bytes = host->failed_bytes;
    bcast.root = host->failed_root;
  }
  uint8_t meta[64];
  host->port.post(host->port.self, worker, MLFAB__BCAST_DATA, meta,
                  mlfab__encode_bcast(meta, &bcast));
}

static void host_bcast_ask(mlfab__host *host, uint32_t worker, const mlfab__bcast *in);

/* The broadcast is over, or failed; those who are ahead already ask for the next. */
static void host_bcast_end(mlfab__host *host, int32_t code, int32_t rank) {
  host->bcasts++;
  for (uint32_t w = 0; w < host->workers; w++) {
    mlfab__attendee *a = &host->attendees[w];
    int root = (int32_t)w == host->root;
    if (a->bcast_asked && (code || root)) {
      host_bcast_post(host, w, host->bcasts - a->bcast_base, host->bytes, code, rank);
    }
    a->bcast_asked = a->bcast_acked = 0;
    a->bcast_given = 0;
  }
  mlfab__free(host->env, host->data, host->bytes);
  host->data = NULL;
  host->active = 0;
  host->failed_code = code;
  host->failed_rank = rank;
  for (uint32_t w = 0; w < host->workers; w++) {
    mlfab__bcast later = host->attendees[w].bcast_later;
    host->attendees[w].bcast_later.number = 0;
    if (later.number != 0) host_bcast_ask(host, w, &later);
  }
}

static void host_bcast_check(mlfab__host *host) {
  if (!host->active) return;
  if (host->attendees[host->root].gone && host->received < host->bytes) {
    host_bcast_end(host, MLFAB_ERR_PEER_DEAD, host->root);
    return;
  }
  if (host->received < host->bytes) return;
  for (uint32_t w = 0; w < host->workers; w++) {
    const mlfab__attendee *a = &host->attendees[w];
    if ((int32_t)w == host->root || a->gone || a->bcast_acked) continue;
    if (!a->done || a->bcast_asked) return;
  }
  host_bcast_end(host, 0, MLFAB_NO_RANK);
}

/* Somebody asks for the broadcast that is next: begins it, or compares. 0, or it has failed. */
static int host_bcast_begin(mlfab__host *host, uint32_t worker, const mlfab__bcast *in) {
  if (host->active) {
    if (in->bytes == host->bytes && in->root == host->root) return 0;
    host->attendees[worker].bcast_asked = 1;
    host->failed_bytes = in->bytes;
    host->failed_root = in->root;
    host_bcast_end(host, MLFAB_ERR_SHAPE, (int32_t)worker);
    return MLFAB_ERR_SHAPE;
  }
  host->root = in->root;
  host->bytes = in->bytes;
  host->received = 0;
  int code = in->bytes > host->config->broadcast_max_bytes ? MLFAB_ERR_LIMIT : 0;
  if (!code) {
    host->data = mlfab__alloc(host->env, in->bytes);
    if (!host->data) code = MLFAB_ERR_MEMORY;
  }
  host->active = 1;
  if (!code) return 0;
  host->attendees[worker].bcast_asked = 1;
  host->data = NULL;
  host_bcast_end(host, code, (int32_t)worker);
  return code;
}

/* A worker asks for a broadcast by its number, root and size. */
static void host_bcast_ask(mlfab__host *host, uint32_t worker, const mlfab__bcast *in) {
  mlfab__attendee *a = &host->attendees[worker];
  uint64_t all = a->bcast_base + in->number;
  int root = (int32_t)worker == in->root;
  if (all <= host->bcasts) {
    int failed = all == host->bcasts && host->failed_code;
    host_bcast_post(host, worker, in->number, in->bytes, failed ? host->failed_code : 0,
                    failed ? host->failed_rank : MLFAB_NO_RANK);
    return;
  }
  if (all > host->bcasts + 1) {
    /* It is through with this one, even if the link broke under the frame that said so. */
    a->bcast_acked = 1;
    a->bcast_later = *in;
    return;
  }
  if (host_bcast_begin(host, worker, in)) return;
  a->bcast_asked = 1;
  a->bcast_given = 0;
  if (root && host->received < host->bytes) {
    host->received = 0;
    host_bcast_post(host, worker, in->number, 0, 0, MLFAB_NO_RANK);
  }
  host->port.ready(host->port.self, worker);
}

static void host_bcast(mlfab__host *host, uint32_t worker, const mlfab__frame_in *frame) {
  mlfab__bcast in;
  mlfab__attendee *a = &host->attendees[worker];
  if (mlfab__decode_bcast(frame->meta, frame->meta_bytes, &in) || in.root < 0 ||
      (uint32_t)in.root >= host->workers || in.bytes == 0 || in.number == 0) {
    host->port.drop(host->port.self, worker, MLFAB_ERR_FRAME, "a BCAST that does not parse");
    return;
  }
  int root = (int32_t)worker == in.root;
  int current = host->active && a->bcast_base + in.number == host->bcasts + 1 &&
                in.root == host->root && in.bytes == host->bytes;
  if (frame->bulk_bytes > 0) {
    if (!current) return; /* of one that has failed meanwhile */
    if (!root || !frame->bulk || in.offset != host->received ||
        frame->bulk_bytes > host->bytes - in.offset) {
      host->port.drop(host->port.self, worker, MLFAB_ERR_FRAME, "broadcast bytes out of place");
      return;
    }
    memcpy(host->data + in.offset, frame->bulk, frame->bulk_bytes);
    host->received += frame->bulk_bytes;
    if (host->received < host->bytes) return;
    for (uint32_t w = 0; w < host->workers; w++) {
      if (host->attendees[w].bcast_asked) host->port.ready(host->port.self, w);
    }
  } else if (in.offset == in.bytes && !root) {
    if (current) a->bcast_acked = 1;
  } else {
    host_bcast_ask(host, worker, &in);
  }
  host_bcast_check(host);
}

MLFAB__INTERNAL void mlfab__host_hello(mlfab__host *host, uint32_t worker, int fresh) {
  mlfab__attendee *a = &host->attendees[worker];
  a->gone = 0;
  if (!fresh) return;
  memset(a, 0, sizeof *a);
  a->barrier_base = host->barriers;
  a->bcast_base = host->bcasts;
}

MLFAB__INTERNAL void mlfab__host_gone(mlfab__host *host, uint32_t worker) {
  mlfab__attendee *a = &host->attendees[worker];
  a->gone = 1;
  a->barrier_waiting = 0;
  a->bcast_asked = 0;
  a->bcast_later.number = 0;
  host_barrier_check(host, MLFAB__NO_NODE);
  host_bcast_check(host);
}

MLFAB__INTERNAL void mlfab__host_done(mlfab__host *host, uint32_t worker) {
  host->attendees[worker].done = 1;
  host_barrier_check(host, MLFAB__NO_NODE);
  host_bcast_check(host);
}

MLFAB__INTERNAL int mlfab__host_frame(mlfab__host *host, uint32_t worker,
                                      const mlfab__frame_in *frame) {
  mlfab__barrier barrier;
  if (frame->type == MLFAB__BCAST) {
    host_bcast(host, worker, frame);
    return 1;
  }
  if (frame->type != MLFAB__BARRIER) return 0;
  if (mlfab__decode_barrier(frame->meta, frame->meta_bytes, &barrier) || barrier.number == 0 ||
      barrier.number >= MLFAB__BARRIER_MISSING) {
    host->port.drop(host->port.self, worker, MLFAB_ERR_FRAME, "a BARRIER that does not parse");
  } else {
    host_barrier(host, worker, barrier.number);
  }
  return 1;
}

MLFAB__INTERNAL int mlfab__host_next(mlfab__host *host, uint32_t worker, mlfab__frame_out *frame) {
  const mlfab__attendee *a = &host->attendees[worker];
  if (!host->active || !a->bcast_asked || host->received < host->bytes) return 0;
  if ((int32_t)worker == host->root || a->bcast_given == host->bytes) return 0;
  mlfab__bcast bcast = {
      host->bcasts + 1 - a->bcast_base, host->bytes, a->bcast_given, host->root, 0, MLFAB_NO_RANK};
  frame->type = MLFAB__BCAST_DATA;
  frame->meta_bytes = mlfab__encode_bcast(frame->meta, &bcast);
  frame->bulk = host->data + a->bcast_given;
  frame->bulk_bytes = (uint32_t)mlfab__min(host->bytes - a->bcast_given, host->config->chunk_bytes);
  frame->token = 0;
  return 1;
}

MLFAB__INTERNAL void mlfab__host_taken(mlfab__host *host, uint32_t worker,
                                       const mlfab__frame_out *frame) {
  host->attendees[worker].bcast_given += frame->bulk_bytes;
}

/* --- a worker --- */

MLFAB__INTERNAL void mlfab__guest_init(mlfab__guest *guest, const mlfab_config *config,
                                       int32_t rank, const mlfab__port *port,
                                       mlfab__requests *requests) {
  memset(guest, 0, sizeof *guest);
  guest->config = config;
  guest->rank = rank;
  guest->port = *port;
  guest->requests = requests;
}

static int guest_open(mlfab__guest *guest, int kind, uint64_t *open, uint64_t timeout_ns,
                      uint64_t now_ns, mlfab_request *request_p, const char *what,
                      mlfab_error *error) {
  if (guest->dead)
    return mlfab__error(error, MLFAB_ERR_PEER_DEAD, 0, 1, 0, "%s: server 0 is dead", what);
  if (*open)
    return mlfab__error(error, MLFAB_ERR_STATE, MLFAB_NO_RANK, 0, 0, "%s: another one is under way",
                        what);
  mlfab__request *request = mlfab__request_open(
      guest->requests, kind, 0, now_ns, timeout_ns ? timeout_ns : guest->config->timeout_ns);
  if (!request)
    return mlfab__error(error, MLFAB_ERR_AGAIN, MLFAB_NO_RANK, 0, 0,
                        "%s: too many requests are open", what);
  *open = *request_p = request->id;
  return 0;
}

static void guest_ask_barrier(mlfab__guest *guest) {
  mlfab__barrier barrier = {guest->barriers};
  uint8_t meta[16];
  guest->port.post(guest->port.self, 0, MLFAB__BARRIER, meta,
                   mlfab__encode_barrier(meta, &barrier));
}

static void guest_ask_bcast(mlfab__guest *guest, uint64_t offset) {
  mlfab__bcast bcast = {guest->bcasts, guest->bytes, offset, guest->root, 0, MLFAB_NO_RANK};
  uint8_t meta[64];
  guest->port.post(guest->port.self, 0, MLFAB__BCAST, meta, mlfab__encode_bcast(meta, &bcast));
}

MLFAB__INTERNAL int mlfab__guest_barrier(mlfab__guest *guest, uint64_t timeout_ns, uint64_t now_ns,
                                         mlfab_request *request_p, mlfab_error *error) {
  int code = guest_open(guest, MLFAB__REQUEST_BARRIER, &guest->barrier_request, timeout_ns, now_ns,
                        request_p, "barrier", error);
  if (code) return code;
  guest->barriers++;
  guest->barrier_missing = MLFAB_NO_RANK;
  guest_ask_barrier(guest);
  return 0;
}

MLFAB__INTERNAL int mlfab__guest_broadcast(mlfab__guest *guest, int32_t root, void *data,
                                           uint64_t bytes, uint64_t timeout_ns, uint64_t now_ns,
                                           mlfab_request *request_p, mlfab_error *error) {
  if (root < 0 || (uint32_t)root >= guest->config->workers) {
    return mlfab__error(error, MLFAB_ERR_RANK_RANGE, root, 0, 0,
                        "broadcast: root %d is not in 0..%u", (int)root,
                        guest->config->workers - 1);
  }
  if (!data || bytes == 0)
    return mlfab__error(error, MLFAB_ERR_ARGUMENT, MLFAB_NO_RANK, 0, 0, "broadcast: no data");
  if (bytes > guest->config->broadcast_max_bytes) {
    return mlfab__error(error, MLFAB_ERR_LIMIT, MLFAB_NO_RANK, 0, 0,
                        "broadcast: %llu bytes, the limit is %llu (broadcast_max_bytes)",
                        (unsigned long long)bytes,
                        (unsigned long long)guest->config->broadcast_max_bytes);
  }
  int code = guest_open(guest, MLFAB__REQUEST_BROADCAST, &guest->bcast_request, timeout_ns, now_ns,
                        request_p, "broadcast", error);
  if (code) return code;
  guest->bcasts++;
  guest->root = root;
  guest->data = data;
  guest->bytes = bytes;
  guest->moved = 0;
  guest->go = 0;
  guest_ask_bcast(guest, 0);
  return 0;
}

MLFAB__INTERNAL void mlfab__guest_withdraw(mlfab__guest *guest, mlfab__request *request, int code,
                                           uint64_t now_ns) {
  int barrier = request->kind == MLFAB__REQUEST_BARRIER;
  int32_t missing = barrier ? guest->barrier_missing : guest->root;
  char waited[24];
  mlfab__duration(waited, now_ns - request->started_ns);
  const char *what = code == MLFAB_ERR_TIMEOUT ? "the deadline passed" : "cancelled";
  if (missing == MLFAB_NO_RANK) {
    mlfab__request_finish(guest->requests, request, code, 0, 1, now_ns,
                          "barrier: %s after %s awaiting server 0", what, waited);
  } else {
    mlfab__request_finish(guest->requests, request, code, missing, 0, now_ns,
                          "%s: %s after %s awaiting worker %d", barrier ? "barrier" : "broadcast",
                          what, waited, (int)missing);
  }
  *(barrier ? &guest->barrier_request : &guest->bcast_request) = 0;
  /* Tried again, it is the same one: the others count it by its number. */
  --*(barrier ? &guest->barriers : &guest->bcasts);
}

MLFAB__INTERNAL void mlfab__guest_hello(mlfab__guest *guest) {
  guest->up = 1;
  if (guest->barrier_request) guest_ask_barrier(guest);
  if (guest->bcast_request) {
    guest->moved = 0;
    guest->go = 0;
    guest_ask_bcast(guest, 0);
  } else if (guest->bcasts > 0 && guest->rank != guest->root) {
    /* That we have the last one may have been lost with the old link, and the root waits for it. */
    guest_ask_bcast(guest, guest->bytes);
  }
}

MLFAB__INTERNAL void mlfab__guest_lost(mlfab__guest *guest) { guest->up = 0; }

static void guest_end(mlfab__guest *guest, uint64_t *open, int code, int32_t rank, int is_server,
                      uint64_t now_ns, const char *what, const char *why) {
  mlfab__request *request = mlfab__request_find(guest->requests, *open);
  *open = 0;
  if (!request) return;
  mlfab__request_finish(guest->requests, request, code, rank, is_server, now_ns, "%s: %s %d%s %s",
                        what, is_server ? "server" : "worker", (int)rank, is_server ? "" : ":",
                        why);
}

MLFAB__INTERNAL void mlfab__guest_dead(mlfab__guest *guest, uint64_t now_ns) {
  guest->dead = 1;
  guest->up = 0;
  guest_end(guest, &guest->barrier_request, MLFAB_ERR_PEER_DEAD, 0, 1, now_ns, "barrier",
            "is dead");
  guest_end(guest, &guest->bcast_request, MLFAB_ERR_PEER_DEAD, 0, 1, now_ns, "broadcast",
            "is dead");
}

/* What the one to blame calls it with, and what this worker or the others do. */
static const char *guest_shape(const mlfab__guest *guest, const mlfab__bcast *in, char text[160]) {
  int mine = in->rank == guest->rank;
  unsigned long long own = guest->bytes, other = in->bytes;
  snprintf(text, 160, "calls it with %llu bytes from worker %d, %s with %llu bytes from worker %d",
           mine ? own : other, (int)(mine ? guest->root : in->root),
           mine ? "others" : "this worker", mine ? other : own,
           (int)(mine ? in->root : guest->root));
  return text;
}

static void guest_bcast(mlfab__guest *guest, const mlfab__bcast *in, const mlfab__frame_in *frame,
                        uint64_t now_ns) {
  char text[160];
  if (!guest->bcast_request || in->number != guest->bcasts) return;
  if (in->code) {
    guest_end(
        guest, &guest->bcast_request, in->code, in->rank, 0, now_ns, "broadcast",
        in->code == MLFAB_ERR_SHAPE ? guest_shape(guest, in, text) : mlfab_error_text(in->code));
    return;
  }
  if (guest->rank == guest->root) {
    if (in->offset == guest->bytes) {
      guest_end(guest, &guest->bcast_request, 0, MLFAB_NO_RANK, 0, now_ns, "", "");
    } else {
      guest->go = 1;
      guest->moved = 0;
      guest->port.ready(guest->port.self, 0);
    }
    return;
  }
  if (frame->bulk_bytes == 0 && in->offset == guest->bytes) {
    /* It is over, for us too: we had everything and said so before the link broke. */
    guest_end(guest, &guest->bcast_request, guest->moved == guest->bytes ? 0 : MLFAB_ERR_REFUSED, 0,
              1, now_ns, "broadcast", "has ended it without this worker");
    return;
  }
  if (!frame->bulk || in->offset != guest->moved || frame->bulk_bytes > guest->bytes - guest->moved)
    return;
  memcpy(guest->data + guest->moved, frame->bulk, frame->bulk_bytes);
  guest->moved += frame->bulk_bytes;
  if (guest->moved < guest->bytes) return;
  guest_ask_bcast(guest, guest->bytes);
  guest_end(guest, &guest->bcast_request, 0, MLFAB_NO_RANK, 0, now_ns, "", "");
}

MLFAB__INTERNAL int mlfab__guest_frame(mlfab__guest *guest, const mlfab__frame_in *frame,
                                       uint64_t now_ns) {
  if (frame->type == MLFAB__BARRIER_DONE) {
    mlfab__barrier barrier;
    if (mlfab__decode_barrier(frame->meta, frame->meta_bytes, &barrier)) {
      guest->port.drop(guest->port.self, 0, MLFAB_ERR_FRAME, "a BARRIER_DONE that does not parse");
    } else if (barrier.number & MLFAB__BARRIER_MISSING) {
      guest->barrier_missing = (int32_t)(barrier.number & 0x7fffffff);
    } else if (barrier.number == guest->barriers) {
      guest_end(guest, &guest->barrier_request, 0, MLFAB_NO_RANK, 0, now_ns, "", "");
    }
    return 1;
  }
  if (frame->type != MLFAB__BCAST_DATA) return 0;
  mlfab__bcast bcast;
  if (mlfab__decode_bcast(frame->meta, frame->meta_bytes, &bcast)) {
    guest->port.drop(guest->port.self, 0, MLFAB_ERR_FRAME, "a BCAST_DATA that does not parse");
  } else {
    guest_bcast(guest, &bcast, frame, now_ns);
  }
  return 1;
}

MLFAB__INTERNAL int mlfab__guest_next(mlfab__guest *guest, mlfab__frame_out *frame) {
  if (!guest->up || !guest->bcast_request || !guest->go || guest->moved == guest->bytes) return 0;
  if (guest->rank != guest->root) return 0;
  mlfab__bcast bcast = {guest->bcasts, guest->bytes, guest->moved, guest->root, 0, MLFAB_NO_RANK};
  frame->type = MLFAB__BCAST;
  frame->meta_bytes = mlfab__encode_bcast(frame->meta, &bcast);
  frame->bulk = guest->data + guest->moved;
  frame->bulk_bytes = (uint32_t)mlfab__min(guest->bytes - guest->moved, guest->config->chunk_bytes);
  frame->token = 0;
  return 1;
}

MLFAB__INTERNAL void mlfab__guest_taken(mlfab__guest *guest, const mlfab__frame_out *frame) {
  guest->moved += frame->bulk_bytes;
}
