/* mpi.c - carries frames between the processes of an MPI job, by point-to-point messages of MPI.
 *
 * For jobs that mpirun or srun starts: it reaches every network that the MPI library knows (InfiniBand, RDMA, shared
 * memory). It uses a duplicate of the communicator, which keeps its messages apart from the program's. It reaches only
 * processes of the communicator, and ends with the first process that dies (stock MPI ends the job). It authenticates
 * nobody: every process of the job is a peer (docs/promises.md). It needs MPI 3.0. Constants begin with MPT_, because
 * MPI_ is reserved.
 *
 * Addresses: "mpi:<rank>/<end>". rank: in the communicator. end: number of the open transport in that process, so that
 * a process may open several contexts; numbers are never used again.
 *
 * Parts. An engine is a process's state for a communicator: the duplicate, operations under way, free blocks. It lasts
 * until MPI_Finalize, because MPI may still read a block after the close of the context that sent it. So no context's
 * env owns blocks. An end is one open transport; any end's poll or wait drives the engine for all of them. MPI calls
 * are made under the engine's lock, and with MPI_THREAD_FUNNELED or _SERIALIZED only by the caller's thread.
 *
 * Messages. A message with tag MPT_HEADS begins with an envelope, eight little-endian numbers of 32 bits:
 *
 *    kind | end of the receiver (CALL) | link of the receiver | link of the sender | head bytes | bulk bytes | credit | 0
 *
 * and, of a FRAME, the head, padded to 8 bytes, and a bulk of up to MPT_INLINE bytes. A larger bulk is a message of its
 * own with tag MPT_BULKS. The receiver takes heads by MPI_Improbe, and posts a receive for the bulk when it has the
 * head. MPI keeps the order of messages between two processes within a tag, so the n-th receive gets the n-th bulk.
 *
 * Links: CALLING -> UP -> closed, or CALLING -> closed.
 *    CALL    to an end: 'make me a link'. Answered by ACCEPT (with the callee's link), or REFUSE (no such end)
 *    CLOSE   the sender has closed its link and sends no more on it. Answered by CLOSED, whichever end closed first
 *    CREDIT  carries only the credit
 *
 * Invariants
 *  (1) At most MPT_WINDOW bytes of a link are sent but not yet released by the receiver, which reports released bytes
 *      in `credit`. So a receiver that does not poll stops its senders, and blocks are bounded: MPT_WINDOW for each
 *      link and direction.
 *  (2) `send` copies bulks into blocks. All borrowing ends with its return, so detach and disconnect need not wait. A
 *      block is free again when MPI_Testsome reports its operation. `lend` is below.
 *  (3) Every bulk announced by a head is received, even if its link is closed by then (into a block that is dropped).
 *      Else later bulks would meet the wrong receive.
 *  (4) An answer or a frame counts only if both links and the sender's rank are those of the envelope.
 *  (5) When `lingering` is 0 and no operation is under way, this process has received all messages that others sent it,
 *      except calls: a CLOSED is the last message of a link. MPI_Finalize first waits for that.
 *
 * Loans. With the option mpi_lend, `lend` makes MPI send a bulk of more than MPT_INLINE bytes in place. MPI cannot take
 * such a send back. So an operation with a loan has these states:
 *
 *    LENT --MPI has let go--> SENT reported
 *      '--detach, or the link is disconnected or DOWN--> KEPT --MPI has let go--> gone, without an event
 *
 *  (6) end.lent is the number of the end's loans, end.kept the number of KEPT loans. Memory of a loan is neither freed
 *      nor written by mlfab or its caller while the loan is LENT or KEPT. The node knows the LENT loans. For the KEPT
 *      loans, the context reports finished requests only while `keeps` is 0. (A collective may overwrite bytes that its
 *      peer has acknowledged; the peer acknowledges when MPI has delivered all of them.)
 *  (7) An end outlives its loans: close waits for them, until the deadline. Then it tells the log, and the loans have
 *      no owner. When MPI itself has failed or is finalised, loans are not counted any more: their end is unknown.
 *
 * Progress. MPI moves messages only while both processes call it. So the close of a process's last end waits, at most
 * MPT_LAST_NS, until MPI has all sent messages. A closed link waits at most MPT_REST_NS for a bulk.
 *
 * Waiting. MPI cannot wake a sleeper. So wait polls, with naps in between that grow to MPT_NAP_NS.
 *
 * Opening is collective, and a collective of MPI does not tell which processes it waits for. So there is a roll call. A
 * process whose time to open is nearly over says HERE to all others, in an empty message. A process that hears this
 * while it opens says HERE, too. At the deadline, the error names the processes that have not said it. While the
 * duplicate is being made, these messages go over the program's own communicator, with the largest tag of MPI.
 * Afterwards no more go there, and every process takes those sent to it. Only an opening that fails leaves messages
 * behind, at processes that have not called mlfab_open. */
#include "mpi.h"

#include "../core/base/env.h"
#include "../core/base/rng.h"
#include "../core/base/system.h"
#include "../core/wire/wire.h"

#if !MLFAB_WITH_MPI
MLFAB_API const mlfab_transport *mlfab_transport_mpi(void) { return NULL; }
#else

#include <mpi.h>

#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#if MPI_VERSION < 3
#error "MLFAB_WITH_MPI needs MPI 3.0"
#endif

#define MPT_SECOND_NS UINT64_C(1000000000)
enum {
  MPT_HEADS = 1, /* tags */
  MPT_BULKS = 2,
  MPT_SAID = 3, /* HERE, while the duplicate is new */
  MPT_HERE = 4, /* the first of MPT_HERES tags, one for each opening */
  MPT_HERES = 16384,
  MPT_ENVELOPE = 32,
  MPT_INLINE = 8192,
  MPT_WINDOW = 2621440, /* two of the largest frames */
  MPT_BLOCK_LEAST = 9,  /* blocks have 2^9 to 2^21 bytes */
  MPT_BLOCK_MOST = 21,
  MPT_TAKE = 16, /* messages taken in one look */
  MPT_LINKS_MAX = 1 << 24,
  MPT_NAP_LEAST_NS = 20000,
  MPT_NAP_NS = 1000000,
  MPT_LOOK_NS = 100000000 /* between two looks for calls without an answer */
};
#define MPT_ANSWER_NS (5 * MPT_SECOND_NS) /* time that a call waits for its answer */
#define MPT_REST_NS (2 * MPT_SECOND_NS)   /* time that a closed link waits for a bulk */
#define MPT_DRAIN_NS (5 * MPT_SECOND_NS)  /* time that MPI_Finalize waits for the other processes */
#define MPT_ROLL_NS MPT_SECOND_NS         /* time of a roll call */
#define MPT_LAST_NS MPT_SECOND_NS         /* time that the close of a process's last end waits */

_Static_assert(2 * (MPT_ENVELOPE + MLFAB_HEADER_BYTES + MLFAB_META_MAX + MLFAB_BULK_MAX) <
                   MPT_WINDOW,
               "a window has room for two of the largest frames");
_Static_assert(MPT_ENVELOPE + MLFAB_HEADER_BYTES + MLFAB_META_MAX + 8 + MPT_INLINE <=
                       1 << MPT_BLOCK_MOST &&
                   MLFAB_BULK_MAX <= 1 << MPT_BLOCK_MOST,
               "a block holds the largest message");

enum mpi_kind {
  MPT_CALL = 0x4d4c4601,
  MPT_ACCEPT,
  MPT_REFUSE,
  MPT_FRAME,
  MPT_CREDIT,
  MPT_CLOSE,
  MPT_CLOSED
};

typedef struct mpi_envelope {
  uint32_t kind, end, to, from, head_bytes, bulk_bytes, credit, zero;
} mpi_envelope;

/* Memory that MPI reads or writes: aligned to 64 bytes. */
typedef struct mpi_block {
  struct mpi_block *next; /* in the list of free blocks, or of a link's frames */
  struct mpi_block *bulk; /* of a received head: its bulk; NULL: it is inside the head's block */
  uint8_t *bytes;
  uint32_t size_log, link; /* link: number of a received head's link */
  uint32_t head_bytes, bulk_bytes;
  bool whole;   /* a received head: the bulk has arrived */
  bool dropped; /* a received head: its link was closed before the bulk arrived */
} mpi_block;

/* An MPI request under way. */
typedef struct mpi_operation {
  mpi_block *block;      /* the memory of MPI's operation; NULL: memory of the caller */
  mpi_block *head;       /* of a receive: the frame; NULL: a send */
  struct mpi_end *lends; /* a loan: its owner; NULL: not a loan, or the owner is closed */
  uint32_t link;         /* a loan: LENT on this link; 0: KEPT */
  int peer;              /* a loan: the MPI rank that it goes to */
  uint64_t token;        /* a loan */
} mpi_operation;

typedef struct mpi_link {
  struct mpi_link *next, *before; /* of its end */
  struct mpi_link *next_ready;
  struct mpi_end *end;
  uint32_t number, peer_link; /* peer_link 0: CALLING */
  int peer;                   /* MPI rank */
  uint32_t peer_end;
  uint64_t token, since_ns; /* since_ns: time at which it was made, or ended */
  mpi_block *first, *last;  /* frames, in the order of the sender */
  uint32_t unreleased;      /* sent, and not released by the peer: bytes */
  uint32_t owed;            /* released here, but not told to the peer */
  uint32_t wants;           /* blocked: bytes that the refused frame needs */
  int32_t code;             /* ended: the reason */
  bool fresh;               /* UP is still to be reported */
  bool blocked, ended, ready;
  const char *why;
} mpi_link;

typedef struct mpi_sent {
  uint32_t link; /* 0: not to be reported any more */
  uint64_t token;
} mpi_sent;

typedef struct mpi_end {
  struct mpi_end *next; /* of the engine */
  struct mpi_engine *engine;
  mlfab__env env;
  uint32_t number;
  mpi_link *links;
  mpi_link *ready_first, *ready_last; /* links that have events to report */
  uint32_t calling, ended;            /* numbers of links that are CALLING; that have ended */
  uint64_t looked_ns;
  mpi_sent *sent;                             /* a ring of sent_room, a power of two */
  uint32_t sent_first, sent_count, sent_room; /* room: for `lent` more */
  uint32_t lent;                              /* loans, LENT or KEPT */
  _Atomic uint32_t kept;                      /* KEPT loans; changes under the lock */
  bool lends;                                 /* the option */
  bool let_go;                                /* kept has become 0: wait ends */
  uint64_t timeout_ns;
  bool woken;
  pthread_cond_t wakes;
  char text[256]; /* of the last DOWN */
} mpi_end;

typedef struct mpi_engine {
  struct mpi_engine *next;
  MPI_Comm comm; /* this engine's own */
  int rank, size;
  pid_t pid;
  pthread_mutex_t lock; /* guards the following members, and every MPI call on comm */
  bool over;            /* MPI was finalised, or has failed: sending is impossible */
  bool spoilt;          /* a collective did not end: comm cannot carry another */
  char missing[128];    /* spoilt: the processes that it waited for */
  char why[256];        /* over: what has failed */
  uint32_t opens;       /* number of openings that have come to exchange cards */
  mpi_end *ends;
  uint32_t next_end;
  mpi_link **links; /* of all ends, at number % links_room */
  uint32_t links_count, links_room, next_link;
  uint32_t lingering; /* number of links with CLOSE sent, and CLOSED not yet received */
  MPI_Request *requests;
  int *done; /* scratch of MPI_Testsome, and the next */
  MPI_Status *statuses;
  mpi_operation *operations;
  int operations_count, operations_room;
  mpi_block *free[MPT_BLOCK_MOST + 1];
  /* Taken from MPI while memory is short: a message, and a head without a block for its bulk. No other message is taken
   * meanwhile. */
  MPI_Message message;
  int message_bytes, message_source;
  mpi_block *parked;
  int parked_source;
} mpi_engine;

/* Engines of this process. Like MPI itself, they exist once in a process. */
static pthread_mutex_t mpi_lock = PTHREAD_MUTEX_INITIALIZER;
static mpi_engine *mpi_engines;
static int mpi_keyval = MPI_KEYVAL_INVALID; /* a communicator's engine */
static pid_t mpi_initialiser;               /* the process in which this file initialised MPI */

static void mpi_nap(uint64_t ns) {
  struct timespec t = {0, (long)ns};
  nanosleep(&t, NULL);
}

/* ---- blocks and operations ---- */

static mpi_block *mpi_take_block(mpi_engine *e, uint32_t bytes) {
  uint32_t size_log = MPT_BLOCK_LEAST;
  while (((uint32_t)1 << size_log) < bytes) size_log++;
  mpi_block *block = e->free[size_log];
  if (block) {
    e->free[size_log] = block->next;
  } else {
    void *memory = NULL;
    block = malloc(sizeof *block);
    if (!block || posix_memalign(&memory, 64, (size_t)1 << size_log)) {
      free(block);
      return NULL;
    }
    memset(block, 0, sizeof *block);
    block->bytes = memory;
    block->size_log = size_log;
  }
  block->next = block->bulk = NULL;
  block->whole = block->dropped = false;
  return block;
}

static void mpi_put_block(mpi_engine *e, mpi_block *block) {
  if (!block) return;
  block->next = e->free[block->size_log];
  e->free[block->size_log] = block;
}

/* Returns a received frame's memory. */
static void mpi_put_frame(mpi_engine *e, mpi_block *head) {
  mpi_put_block(e, head->bulk);
  mpi_put_block(e, head);
}

/* Makes room for `more` operations. */
static bool mpi_reserve_operations(mpi_engine *e, int more) {
  if (e->operations_count + more <= e->operations_room) return true;
  int room = 2 * e->operations_room + 64;
  MPI_Request *requests = realloc(e->requests, (size_t)room * sizeof *requests);
  if (requests) e->requests = requests;
  mpi_operation *operations = realloc(e->operations, (size_t)room * sizeof *operations);
  if (operations) e->operations = operations;
  int *done = realloc(e->done, (size_t)room * sizeof *done);
  if (done) e->done = done;
  MPI_Status *statuses = realloc(e->statuses, (size_t)room * sizeof *statuses);
  if (statuses) e->statuses = statuses;
  if (!requests || !operations || !done || !statuses) return false;
  e->operations_room = room;
  return true;
}

static void mpi_make_ready(mpi_link *link) {
  mpi_end *t = link->end;
  if (link->ready) return;
  link->ready = true;
  link->next_ready = NULL;
  if (t->ready_last)
    t->ready_last->next_ready = link;
  else
    t->ready_first = link;
  t->ready_last = link;
}

static void mpi_end_link(mpi_link *link, int code, const char *why) {
  if (link->ended) return;
  link->ended = true;
  link->since_ns = mlfab__monotonic(NULL);
  link->end->ended++;
  link->code = code;
  link->why = why;
  mpi_make_ready(link);
}

/* Counts KEPT loans as gone. */
static void mpi_let_go(mpi_end *t, uint32_t loans) {
  if (loans == 0 || atomic_fetch_sub(&t->kept, loans) > loans) return;
  t->let_go = true;
  pthread_cond_signal(&t->wakes);
}

/* Ends all links, for this reason: an MPI call has failed, or MPI is finalised. */
static void mpi_fail(mpi_engine *e, int code, const char *format, ...) MLFAB__PRINTF(3, 4);
static void mpi_fail(mpi_engine *e, int code, const char *format, ...) {
  va_list arguments;
  if (e->over) return;
  e->over = true;
  va_start(arguments, format);
  mlfab__vformat(e->why, sizeof e->why, format, arguments);
  va_end(arguments);
  for (mpi_end *t = e->ends; t; t = t->next) {
    for (mpi_link *link = t->links; link; link = link->next) mpi_end_link(link, code, e->why);
    mpi_let_go(t, atomic_load(&t->kept));
    t->lent = 0;
  }
}

/* MPI's text for an error, at most 127 bytes of it. */
static const char *mpi_says(int result, char text[128]) {
  char whole[MPI_MAX_ERROR_STRING];
  int n = 0;
  if (MPI_Error_string(result, whole, &n) != MPI_SUCCESS) n = 0;
  snprintf(text, 128, "%.*s", n, whole);
  return text;
}

/* Checks the result of an MPI call, which concerns this process (MPI_ANY_SOURCE: all). */
static bool mpi_ok(mpi_engine *e, int result, const char *call, int peer) {
  char text[128];
  if (MLFAB__LIKELY(result == MPI_SUCCESS)) return true;
  if (peer == MPI_ANY_SOURCE)
    mpi_fail(e, MLFAB_ERR_IO, "%s failed at MPI rank %d: %s", call, e->rank,
             mpi_says(result, text));
  else
    mpi_fail(e, MLFAB_ERR_IO, "%s between MPI ranks %d and %d failed: %s", call, e->rank, peer,
             mpi_says(result, text));
  return false;
}

/* Begins to send a block, which belongs to the engine until MPI has let go. There is room for the operation. */
static void mpi_post_send(mpi_engine *e, mpi_block *block, uint32_t bytes, int to, int tag) {
  int at = e->operations_count;
  if (!mpi_ok(e, MPI_Isend(block->bytes, (int)bytes, MPI_BYTE, to, tag, e->comm, &e->requests[at]),
              "MPI_Isend", to))
    return;
  e->operations[at] = (mpi_operation){.block = block};
  e->operations_count++;
}

/* Begins to send a bulk in place. There is room for the operation, and for its report. */
static void mpi_post_loan(const mpi_link *link, const void *bulk, uint32_t bytes, uint64_t token) {
  mpi_end *t = link->end;
  mpi_engine *e = t->engine;
  int at = e->operations_count;
  if (e->over || !mpi_ok(e,
                         MPI_Isend(bulk, (int)bytes, MPI_BYTE, link->peer, MPT_BULKS, e->comm,
                                   &e->requests[at]),
                         "MPI_Isend", link->peer))
    return;
  e->operations[at] =
      (mpi_operation){.lends = t, .link = link->number, .peer = link->peer, .token = token};
  e->operations_count++;
  t->lent++;
}

/* Takes back the loans on this link with this token, or (`all`) with any token. */
static void mpi_take_back(const mpi_link *link, uint64_t token, bool all) {
  mpi_end *t = link->end;
  mpi_engine *e = t->engine;
  for (int i = 0; t->lent > atomic_load(&t->kept) && i < e->operations_count; i++) {
    mpi_operation *operation = &e->operations[i];
    if (operation->lends != t || operation->link != link->number) continue;
    if (!all && operation->token != token) continue;
    operation->link = 0;
    atomic_fetch_add(&t->kept, 1);
  }
}

/* Ends a loan that MPI has let go. */
static void mpi_end_loan(const mpi_operation *operation) {
  mpi_end *t = operation->lends;
  if (t->lent == 0) return; /* MPI had failed */
  t->lent--;
  if (operation->link == 0) {
    if (atomic_load(&t->kept) > 0) mpi_let_go(t, 1);
    return;
  }
  t->sent[(t->sent_first + t->sent_count++) & (t->sent_room - 1)] =
      (mpi_sent){operation->link, operation->token};
}

static void mpi_end_operation(mpi_engine *e, const mpi_operation *operation) {
  mpi_block *head = operation->head;
  if (operation->lends) {
    mpi_end_loan(operation);
  } else if (!head) {
    mpi_put_block(e, operation->block);
  } else if (head->dropped) {
    mpi_put_frame(e, head);
  } else {
    head->whole = true;
    mpi_link *link = e->links[head->link % e->links_room];
    if (link->first == head) mpi_make_ready(link);
  }
}

static void mpi_complete(mpi_engine *e) {
  int n = 0, kept = 0;
  if (e->operations_count == 0) return;
  if (!mpi_ok(e, MPI_Testsome(e->operations_count, e->requests, &n, e->done, e->statuses),
              "MPI_Testsome", MPI_ANY_SOURCE))
    return;
  if (n <= 0) return;
  for (int i = 0; i < n; i++) mpi_end_operation(e, &e->operations[e->done[i]]);
  for (int i = 0; i < e->operations_count; i++) {
    if (e->requests[i] == MPI_REQUEST_NULL) continue;
    e->requests[kept] = e->requests[i];
    e->operations[kept++] = e->operations[i];
  }
  e->operations_count = kept;
}

/* ---- envelopes ---- */

static void mpi_write(uint8_t *at, const mpi_envelope *envelope) {
  const uint32_t words[8] = {
      envelope->kind,       envelope->end,        envelope->to,     envelope->from,
      envelope->head_bytes, envelope->bulk_bytes, envelope->credit, 0};
  for (int i = 0; i < 8; i++) {
    for (int k = 0; k < 4; k++) *at++ = (uint8_t)(words[i] >> 8 * k);
  }
}

static mpi_envelope mpi_read(const uint8_t *at) {
  uint32_t words[8];
  for (int i = 0; i < 8; i++, at += 4)
    words[i] = at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
  return (mpi_envelope){words[0], words[1], words[2], words[3],
                        words[4], words[5], words[6], words[7]};
}

static uint32_t mpi_up8(uint32_t bytes) { return (bytes + 7) & ~7u; }

/* The part of the window that a frame takes. */
static uint32_t mpi_cost(uint32_t head_bytes, uint32_t bulk_bytes) {
  return MPT_ENVELOPE + head_bytes + bulk_bytes;
}

/* Sends a message without a frame. Without memory for it all links end, because the peer would wait for it. */
static void mpi_tell(mpi_engine *e, int peer, const mpi_envelope *envelope) {
  if (e->over) return;
  mpi_block *block = mpi_reserve_operations(e, 1) ? mpi_take_block(e, MPT_ENVELOPE) : NULL;
  if (!block) {
    mpi_fail(e, MLFAB_ERR_MEMORY, "MPI rank %d is out of memory for a message to MPI rank %d",
             e->rank, peer);
    return;
  }
  mpi_write(block->bytes, envelope);
  mpi_post_send(e, block, MPT_ENVELOPE, peer, MPT_HEADS);
}

static void mpi_tell_link(mpi_link *link, enum mpi_kind kind) {
  mpi_envelope envelope = {.kind = kind, .to = link->peer_link, .from = link->number};
  envelope.credit = link->owed;
  link->owed = 0;
  mpi_tell(link->end->engine, link->peer, &envelope);
}

/* ---- links ---- */

static mpi_link *mpi_link_of(mpi_engine *e, uint32_t number) {
  mpi_link *link = e->links_room ? e->links[number % e->links_room] : NULL;
  return link && link->number == number ? link : NULL;
}

/* The link of this end with this number. */
static mpi_link *mpi_find(const mpi_end *t, uint32_t number) {
  mpi_link *link = mpi_link_of(t->engine, number);
  return link && link->end == t ? link : NULL;
}

static bool mpi_reserve_link(mpi_engine *e) {
  if (2 * e->links_count < e->links_room) return true;
  uint32_t room = e->links_room ? 2 * e->links_room : 64;
  mpi_link **links = room < MPT_LINKS_MAX ? calloc(room, sizeof(mpi_link *)) : NULL;
  if (!links) return false;
  for (uint32_t i = 0; i < e->links_room; i++) {
    if (e->links[i]) links[e->links[i]->number % room] = e->links[i];
  }
  free(e->links);
  e->links = links;
  e->links_room = room;
  return true;
}

static mpi_link *mpi_new_link(mpi_end *t, int peer, uint32_t peer_end) {
  mpi_engine *e = t->engine;
  mpi_link *link = mpi_reserve_link(e) ? mlfab__alloc(&t->env, sizeof *link) : NULL;
  if (!link) return NULL;
  do {
    e->next_link = e->next_link + 1 < MPT_LINKS_MAX ? e->next_link + 1 : 1;
  } while (e->links[e->next_link % e->links_room]);
  link->number = e->next_link;
  e->links[link->number % e->links_room] = link;
  e->links_count++;
  link->end = t;
  link->peer = peer;
  link->peer_end = peer_end;
  link->since_ns = mlfab__monotonic(NULL);
  link->next = t->links;
  if (t->links) t->links->before = link;
  t->links = link;
  return link;
}

/* Drops the frames that were not delivered. */
static void mpi_drop_frames(mpi_link *link) {
  while (link->first) {
    mpi_block *head = link->first;
    link->first = head->next;
    if (head->whole)
      mpi_put_frame(link->end->engine, head);
    else
      head->dropped = true; /* the receive under way frees it */
  }
}

static void mpi_free_link(mpi_link *link) {
  mpi_end *t = link->end;
  mpi_engine *e = t->engine;
  mpi_drop_frames(link);
  mpi_take_back(link, 0, true);
  for (uint32_t i = 0; i < t->sent_count; i++) {
    mpi_sent *sent = &t->sent[(t->sent_first + i) & (t->sent_room - 1)];
    if (sent->link == link->number) sent->link = 0;
  }
  mpi_link **at = &t->ready_first, *last = NULL;
  while (*at && *at != link) last = *at, at = &(*at)->next_ready;
  if (*at) {
    *at = link->next_ready;
    if (t->ready_last == link) t->ready_last = last;
  }
  if (link->before)
    link->before->next = link->next;
  else
    t->links = link->next;
  if (link->next) link->next->before = link->before;
  t->calling -= link->peer_link == 0;
  t->ended -= link->ended;
  e->links[link->number % e->links_room] = NULL;
  e->links_count--;
  mlfab__free(&t->env, link, sizeof *link);
}

/* Closes a link from this side. */
static void mpi_close_link(mpi_link *link) {
  mpi_engine *e = link->end->engine;
  if (!link->ended && link->peer_link && !e->over) {
    e->lingering++;
    mpi_tell_link(link, MPT_CLOSE);
  }
  mpi_free_link(link);
}

static bool mpi_has_room(const mpi_link *link, uint32_t cost) {
  return link->unreleased + cost <= MPT_WINDOW;
}

/* ---- messages that arrive ---- */

static mpi_end *mpi_end_of(mpi_engine *e, uint32_t number) {
  mpi_end *t = e->ends;
  while (t && t->number != number) t = t->next;
  return t;
}

static void mpi_on_call(mpi_engine *e, const mpi_envelope *in, int source) {
  mpi_end *t = mpi_end_of(e, in->end);
  mpi_link *link = t ? mpi_new_link(t, source, in->credit) : NULL;
  mpi_envelope out = {.kind = MPT_REFUSE, .to = in->from};
  if (link) {
    link->peer_link = in->from;
    link->fresh = true;
    mpi_make_ready(link);
    out.kind = MPT_ACCEPT;
    out.from = link->number;
  }
  mpi_tell(e, source, &out);
}

/* Takes the answer to a call. If the call was given up, the callee has a link that nobody wants. */
static void mpi_on_answer(mpi_engine *e, const mpi_envelope *in, int source) {
  mpi_link *link = mpi_link_of(e, in->to);
  if (!link || link->peer != source || link->peer_link || link->ended) {
    if (in->kind != MPT_ACCEPT) return;
    mpi_envelope out = {.kind = MPT_CLOSE, .to = in->from, .from = in->to};
    e->lingering++;
    mpi_tell(e, source, &out);
    return;
  }
  if (in->kind == MPT_REFUSE) {
    mpi_end_link(link, MLFAB_ERR_REFUSED, "nobody listens at");
    return;
  }
  link->peer_link = in->from;
  link->end->calling--;
  link->fresh = true;
  mpi_make_ready(link);
}

/* The addressee of a message on an established link; NULL: it was closed here. */
static mpi_link *mpi_addressee(mpi_engine *e, const mpi_envelope *in, int source) {
  mpi_link *link = mpi_link_of(e, in->to);
  return link && link->peer == source && link->peer_link == in->from ? link : NULL;
}

static void mpi_on_credit(mpi_link *link, uint32_t credit) {
  link->unreleased -= credit < link->unreleased ? credit : link->unreleased;
  if (link->blocked && mpi_has_room(link, link->wants)) mpi_make_ready(link);
}

/* Appends a frame to its link. A head that differs from its announcement ends the link. */
static void mpi_on_frame(mpi_engine *e, mpi_link *link, mpi_block *head) {
  uint32_t head_bytes = 0, bulk_bytes = 0;
  if (!link || link->ended) {
    if (head->whole)
      mpi_put_frame(e, head);
    else
      head->dropped = true;
    return;
  }
  int code = mlfab_frame_check(head->bytes + MPT_ENVELOPE, &head_bytes, &bulk_bytes);
  if (!code && (head_bytes != head->head_bytes || bulk_bytes != head->bulk_bytes))
    code = MLFAB_ERR_FRAME;
  if (code) {
    e->lingering++;
    mpi_tell_link(link, MPT_CLOSE);
    mpi_end_link(link, code, "sent a frame that does not parse");
    if (head->whole)
      mpi_put_frame(e, head);
    else
      head->dropped = true;
    return;
  }
  head->link = link->number;
  head->next = NULL;
  if (link->first)
    link->last->next = head;
  else
    link->first = head;
  link->last = head;
  if (link->first->whole) mpi_make_ready(link);
}

/* Posts the receive of the parked head's bulk. False: no memory yet, or the engine has failed. */
static bool mpi_unpark(mpi_engine *e) {
  mpi_block *head = e->parked;
  if (!head) return true;
  const mpi_envelope in = mpi_read(head->bytes);
  mpi_link *link = mpi_addressee(e, &in, e->parked_source);
  mpi_block *bulk = mpi_reserve_operations(e, 1) ? mpi_take_block(e, head->bulk_bytes) : NULL;
  if (!bulk) return false;
  int at = e->operations_count;
  head->bulk = bulk;
  if (!mpi_ok(e,
              MPI_Irecv(bulk->bytes, (int)head->bulk_bytes, MPI_BYTE, e->parked_source, MPT_BULKS,
                        e->comm, &e->requests[at]),
              "MPI_Irecv", e->parked_source))
    return false;
  e->parked = NULL;
  e->operations[at] = (mpi_operation){.block = bulk, .head = head};
  e->operations_count++;
  mpi_on_frame(e, link, head);
  return true;
}

/* Do the lengths of a frame's message agree with its envelope? */
static bool mpi_frame_fits(const mpi_envelope *in, uint32_t bytes) {
  if (in->head_bytes < MLFAB_HEADER_BYTES || in->head_bytes > MLFAB_HEADER_BYTES + MLFAB_META_MAX ||
      in->bulk_bytes > MLFAB_BULK_MAX)
    return false;
  uint32_t inside = in->bulk_bytes <= MPT_INLINE ? in->bulk_bytes : 0;
  return bytes == MPT_ENVELOPE + mpi_up8(in->head_bytes) + inside;
}

/* Takes a message that has arrived. The function owns the block. */
static void mpi_dispatch(mpi_engine *e, mpi_block *block, uint32_t bytes, int source) {
  mpi_envelope in = mpi_read(block->bytes);
  if (bytes < MPT_ENVELOPE || in.kind < MPT_CALL || in.kind > MPT_CLOSED ||
      (in.kind == MPT_FRAME && !mpi_frame_fits(&in, bytes))) {
    mpi_fail(e, MLFAB_ERR_FRAME, "a message of MPI rank %d on the communicator is not mlfab's",
             source);
    mpi_put_block(e, block);
    return;
  }
  mpi_link *link = mpi_addressee(e, &in, source);
  if (link && in.kind != MPT_CALL) mpi_on_credit(link, in.credit);
  if (in.kind == MPT_FRAME) {
    block->head_bytes = in.head_bytes;
    block->bulk_bytes = in.bulk_bytes;
    block->whole = in.bulk_bytes <= MPT_INLINE;
    if (block->whole) {
      mpi_on_frame(e, link, block);
    } else {
      e->parked = block;
      e->parked_source = source;
      mpi_unpark(e);
    }
    return;
  }
  mpi_put_block(e, block);
  if (in.kind == MPT_CALL) {
    mpi_on_call(e, &in, source);
  } else if (in.kind == MPT_ACCEPT || in.kind == MPT_REFUSE) {
    mpi_on_answer(e, &in, source);
  } else if (in.kind == MPT_CLOSE) {
    mpi_envelope out = {.kind = MPT_CLOSED, .to = in.from, .from = in.to};
    mpi_tell(e, source, &out);
    if (link) mpi_end_link(link, MLFAB_ERR_PEER_CLOSED, "closed the link");
  } else if (in.kind == MPT_CLOSED && e->lingering > 0) {
    e->lingering--;
  }
}

/* Takes one message. Returns 1; 0: there is none, or memory for it is short. */
static int mpi_take(mpi_engine *e) {
  MPI_Status status;
  int found = 0;
  if (e->message == MPI_MESSAGE_NULL) {
    if (!mpi_ok(e, MPI_Improbe(MPI_ANY_SOURCE, MPT_HEADS, e->comm, &found, &e->message, &status),
                "MPI_Improbe", MPI_ANY_SOURCE))
      return 0;
    if (!found) {
      e->message = MPI_MESSAGE_NULL;
      return 0;
    }
    MPI_Get_count(&status, MPI_BYTE, &e->message_bytes);
    e->message_source = status.MPI_SOURCE;
    if (e->message_bytes > 1 << MPT_BLOCK_MOST) {
      mpi_fail(e, MLFAB_ERR_FRAME, "a message of MPI rank %d on the communicator is not mlfab's",
               e->message_source);
      return 0;
    }
  }
  mpi_block *block = mpi_take_block(e, (uint32_t)e->message_bytes);
  if (!block) return 0;
  if (!mpi_ok(e, MPI_Mrecv(block->bytes, e->message_bytes, MPI_BYTE, &e->message, &status),
              "MPI_Mrecv", e->message_source)) {
    mpi_put_block(e, block);
    return 0;
  }
  e->message = MPI_MESSAGE_NULL;
  mpi_dispatch(e, block, (uint32_t)e->message_bytes, e->message_source);
  return 1;
}

/* Lets MPI work, and takes messages that have come. */
static void mpi_progress(mpi_engine *e) {
  if (e->over) return;
  mpi_complete(e);
  if (!mpi_unpark(e)) return;
  for (int i = 0; i < MPT_TAKE && !e->over && !e->parked && mpi_take(e); i++) continue;
}

/* Lets MPI work until all operations have ended, and (`answered`) every CLOSE is answered; at most until `until`. */
static void mpi_drain(mpi_engine *e, uint64_t until, bool answered) {
  while (!e->over && (e->operations_count > 0 || (answered && e->lingering > 0)) &&
         mlfab__monotonic(NULL) < until) {
    mpi_progress(e);
    if (e->operations_count > 0 || e->lingering > 0) mpi_nap(MPT_NAP_LEAST_NS);
  }
}

/* ---- engines ---- */

/* MPI_Finalize calls it first. Waits until this process has no messages under way (invariant 5), then frees all memory
 * that MPI does not use. */
static int mpi_at_finalize(MPI_Comm comm, int keyval, void *value, void *extra) {
  mpi_engine *e = value;
  (void)comm, (void)keyval, (void)extra;
  pthread_mutex_lock(&e->lock);
  for (mpi_end *t = e->ends; t; t = t->next) { /* a context that the program has not closed */
    for (mpi_link *link = t->links; link; link = link->next) {
      if (link->ended || !link->peer_link || e->over) continue;
      e->lingering++;
      mpi_tell_link(link, MPT_CLOSE);
    }
  }
  mpi_drain(e, mlfab__monotonic(NULL) + MPT_DRAIN_NS, true);
  mpi_fail(e, MLFAB_ERR_CLOSED, "MPI was finalised");
  for (int i = 0; i <= MPT_BLOCK_MOST; i++) {
    while (e->free[i]) {
      mpi_block *block = e->free[i];
      e->free[i] = block->next;
      free(block->bytes);
      free(block);
    }
  }
  pthread_mutex_unlock(&e->lock);
  return MPI_SUCCESS;
}

/* If this file has initialised MPI, it finalises MPI, provided that every context was closed. A process that ends with
 * an open context has failed: mpirun then sees that it did not finalise, and ends the job. */
static void mpi_at_exit(void) {
  int finalized = 1;
  if (getpid() != mpi_initialiser || MPI_Finalized(&finalized) || finalized) return;
  for (mpi_engine *e = mpi_engines; e; e = e->next) {
    if (e->ends) return;
  }
  MPI_Finalize();
}

static const char *mpi_level_name(int level) {
  return level == MPI_THREAD_MULTIPLE     ? "MPI_THREAD_MULTIPLE"
         : level == MPI_THREAD_SERIALIZED ? "MPI_THREAD_SERIALIZED"
         : level == MPI_THREAD_FUNNELED   ? "MPI_THREAD_FUNNELED"
                                          : "MPI_THREAD_SINGLE";
}

/* Initialises MPI if nobody has. May this thread call it? */
static int mpi_begin(int *level_p, mlfab_error *error) {
  int begun = 0, ended = 0, here = 1;
  MPI_Initialized(&begun);
  MPI_Finalized(&ended);
  if (ended) return MLFAB__FAIL(error, MLFAB_ERR_STATE, "mpi: MPI was finalised");
  if (!begun) {
    if (MPI_Init_thread(NULL, NULL, MPI_THREAD_MULTIPLE, level_p) != MPI_SUCCESS)
      return MLFAB__FAIL(error, MLFAB_ERR_IO, "mpi: MPI_Init_thread failed");
    mpi_initialiser = getpid();
    if (atexit(mpi_at_exit)) return MLFAB__FAIL(error, MLFAB_ERR_MEMORY, "mpi: atexit has no room");
  }
  MPI_Query_thread(level_p);
  if (*level_p == MPI_THREAD_SINGLE)
    return MLFAB__FAIL(error, MLFAB_ERR_CONFIG,
                       "mpi: MPI was initialised at MPI_THREAD_SINGLE (MPI_Init); mlfab needs "
                       "MPI_Init_thread with MPI_THREAD_FUNNELED or more");
  MPI_Is_thread_main(&here);
  if (*level_p == MPI_THREAD_FUNNELED && !here)
    return MLFAB__FAIL(error, MLFAB_ERR_STATE,
                       "mpi: with MPI_THREAD_FUNNELED only the thread that initialised MPI may "
                       "call mlfab");
  return 0;
}

/* ---- the roll call of an opening ---- */

typedef struct mpi_roll {
  MPI_Comm comm;
  int tag, rank, size;
  uint32_t heard;      /* number of others that have said HERE */
  int said;            /* this process has */
  int *told;           /* by rank: 1 if it has said HERE */
  unsigned char *here; /* by rank: 1 if its HERE was taken */
} mpi_roll;

static void mpi_roll_end(mpi_roll *roll) {
  free(roll->told);
  free(roll->here);
}

static int mpi_roll_begin(mpi_roll *roll, MPI_Comm comm, int tag, mlfab_error *error) {
  *roll = (mpi_roll){.comm = comm, .tag = tag};
  MPI_Comm_rank(comm, &roll->rank);
  MPI_Comm_size(comm, &roll->size);
  roll->told = calloc((size_t)roll->size, sizeof *roll->told);
  roll->here = calloc((size_t)roll->size, 1);
  if (roll->told && roll->here) {
    roll->here[roll->rank] = 1;
    return 0;
  }
  mpi_roll_end(roll);
  return MLFAB__FAIL(error, MLFAB_ERR_MEMORY, "mpi: out of memory");
}

static void mpi_roll_say(mpi_roll *roll) {
  MPI_Request request;
  if (roll->said) return;
  roll->said = 1;
  for (int r = 0; r < roll->size; r++) {
    if (r == roll->rank) continue;
    MPI_Isend(NULL, 0, MPI_BYTE, r, roll->tag, roll->comm, &request);
    MPI_Request_free(&request); /* nothing is borrowed */
  }
}

static void mpi_roll_hear(mpi_roll *roll) {
  MPI_Status status;
  int found = 0;
  while (MPI_Iprobe(MPI_ANY_SOURCE, roll->tag, roll->comm, &found, &status) == MPI_SUCCESS &&
         found) {
    MPI_Recv(NULL, 0, MPI_BYTE, status.MPI_SOURCE, roll->tag, roll->comm, MPI_STATUS_IGNORE);
    roll->heard += !roll->here[status.MPI_SOURCE];
    roll->here[status.MPI_SOURCE] = 1;
  }
}

/* Takes the HEREs that were sent to this process, and are still on the way. `told` lists their senders. */
static void mpi_roll_drain(mpi_roll *roll) {
  for (int r = 0; r < roll->size; r++) {
    if (!roll->told[r] || roll->here[r]) continue;
    MPI_Recv(NULL, 0, MPI_BYTE, r, roll->tag, roll->comm, MPI_STATUS_IGNORE);
  }
}

/* Appends a rank to a list as "2, 5"; `left` places are left, then "and more". */
static void mpi_list(char *text, size_t room, int rank, uint32_t count) {
  size_t n = strlen(text);
  if (count < 12)
    snprintf(text + n, room - n, "%s%d", count ? ", " : "", rank);
  else if (count == 12)
    snprintf(text + n, room - n, " and more");
}

/* Writes the ranks that have not said HERE: "MPI rank 2 has", "MPI ranks 2, 5 have". Returns 0 if all have. */
static uint32_t mpi_roll_missing(const mpi_roll *roll, char *text, size_t room) {
  char list[96] = "";
  uint32_t n = 0;
  for (int r = 0; r < roll->size; r++) {
    if (!roll->here[r]) mpi_list(list, sizeof list, r, n++);
  }
  snprintf(text, room, n == 1 ? "MPI rank %s has" : "MPI ranks %s have", list);
  return n;
}

/* Waits for a collective of an opening, at most until `until`. Returns 0, TIMEOUT or IO. */
static int mpi_await(MPI_Request *request, uint64_t until, mpi_roll *roll) {
  int done = 0;
  uint64_t nap = MPT_NAP_LEAST_NS, now = mlfab__monotonic(NULL);
  uint64_t call = now < until ? until - mlfab__min((until - now) / 4, MPT_ROLL_NS) : now;
  while (MPI_Test(request, &done, MPI_STATUS_IGNORE) == MPI_SUCCESS && !done) {
    now = mlfab__monotonic(NULL);
    mpi_roll_hear(roll);
    if (now >= until) return MLFAB_ERR_TIMEOUT;
    if (now >= call || roll->heard > 0) mpi_roll_say(roll);
    mpi_nap(nap);
    nap = mlfab__min(2 * nap, MPT_NAP_NS);
  }
  return done ? 0 : MLFAB_ERR_IO;
}

/* Makes the error for a collective of an opening that has not ended, and marks the engine as spoilt. */
static int mpi_absent(mpi_engine *e, const mpi_roll *roll, int code, uint64_t timeout_ns,
                      mlfab_error *error) {
  char waited[24];
  uint32_t missing = mpi_roll_missing(roll, e->missing, sizeof e->missing);
  e->spoilt = true;
  if (missing == 0)
    snprintf(e->missing, sizeof e->missing, "a process that came too late, or MPI rank %d has",
             roll->rank);
  if (code != MLFAB_ERR_TIMEOUT)
    return MLFAB__FAIL(error, code,
                       "mpi: MPI reports an error at MPI rank %d while mlfab_open waits for the "
                       "other processes",
                       roll->rank);
  mlfab__duration(waited, timeout_ns);
  if (missing == 0)
    return mlfab__error(error, code, MLFAB_NO_RANK, 0, timeout_ns,
                        "mpi: after %s mlfab_open still waits at MPI rank %d, though all %d "
                        "processes have called it: some gave up before the last came",
                        waited, roll->rank, roll->size);
  return mlfab__error(error, code, MLFAB_NO_RANK, 0, timeout_ns,
                      "mpi: after %s %s not called mlfab_open, which is collective over MPI: %u of "
                      "%d processes have",
                      waited, e->missing, (uint32_t)roll->size - missing, roll->size);
}

/* ---- making an engine ---- */

/* Takes every HERE that was sent to this process over the program's communicator. Over the duplicate, all tell each
 * other who has said it; nobody says it there any more. On an error, memory that MPI may still write stays. */
static int mpi_take_heres(mpi_engine *e, mpi_roll *roll, uint64_t until, uint64_t timeout_ns,
                          mlfab_error *error) {
  MPI_Request request = MPI_REQUEST_NULL;
  mpi_roll again;
  int code = mpi_roll_begin(&again, e->comm, MPT_SAID, error);
  if (code) {
    e->spoilt = true; /* the others wait for this process */
    snprintf(e->missing, sizeof e->missing, "MPI rank %d has", roll->rank);
    return code;
  }
  again.heard = roll->heard + (uint32_t)roll->said;
  roll->told[roll->rank] = roll->said;
  code = MPI_Iallgather(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, roll->told, 1, MPI_INT, e->comm,
                        &request) == MPI_SUCCESS
             ? 0
             : MLFAB_ERR_IO;
  if (!code) code = mpi_await(&request, until, &again);
  for (int r = 0; r < roll->size; r++) again.here[r] |= roll->here[r];
  if (code)
    code = mpi_absent(e, &again, code, timeout_ns, error);
  else
    mpi_roll_drain(roll);
  mpi_roll_end(&again);
  return code;
}

/* Duplicates the communicator: waits for all processes. On an error, memory that MPI may still write stays. */
static int mpi_duplicate(mpi_engine *e, MPI_Comm parent, uint64_t timeout_ns, mlfab_error *error) {
  MPI_Request request = MPI_REQUEST_NULL;
  mpi_roll roll;
  int found = 0, *most = NULL;
  uint64_t until = mlfab__add_sat(mlfab__monotonic(NULL), timeout_ns);
  MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, &most, &found);
  int code = mpi_roll_begin(&roll, parent, found ? *most : 32767, error);
  if (code) return code;
  code = MPI_Comm_idup(parent, &e->comm, &request) == MPI_SUCCESS ? 0 : MLFAB_ERR_IO;
  if (!code) code = mpi_await(&request, until, &roll);
  if (code) {
    code = mpi_absent(e, &roll, code, timeout_ns, error);
    mpi_roll_end(&roll);
    return code;
  }
  MPI_Comm_set_errhandler(e->comm, MPI_ERRORS_RETURN);
  code = mpi_take_heres(e, &roll, until, timeout_ns, error);
  if (!code) mpi_roll_end(&roll);
  return code;
}

/* Makes the engine of a communicator. */
static int mpi_make_engine(MPI_Comm parent, uint64_t timeout_ns, mpi_engine **engine_p,
                           mlfab_error *error) {
  int keyval = MPI_KEYVAL_INVALID;
  mpi_engine *e = calloc(1, sizeof *e);
  if (!e) return MLFAB__FAIL(error, MLFAB_ERR_MEMORY, "mpi: out of memory");
  e->message = MPI_MESSAGE_NULL;
  e->pid = getpid();
  pthread_mutex_init(&e->lock, NULL);
  int code = mpi_duplicate(e, parent, timeout_ns, error);
  if (code) { /* MPI may still write e->comm: e stays */
    e->spoilt = e->over = true;
  } else {
    MPI_Comm_rank(e->comm, &e->rank);
    MPI_Comm_size(e->comm, &e->size);
    MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, mpi_at_finalize, &keyval, NULL);
    MPI_Comm_set_attr(MPI_COMM_SELF, keyval, e);
  }
  if (mpi_keyval == MPI_KEYVAL_INVALID)
    MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, MPI_COMM_NULL_DELETE_FN, &mpi_keyval, NULL);
  MPI_Comm_set_attr(parent, mpi_keyval, e);
  e->next = mpi_engines;
  mpi_engines = e;
  *engine_p = e;
  return code;
}

/* The engine of a communicator; NULL is MPI_COMM_WORLD. */
static int mpi_get_engine(const MPI_Comm *comm, uint64_t timeout_ns, mpi_engine **engine_p,
                          mlfab_error *error) {
  MPI_Comm parent = comm ? *comm : MPI_COMM_WORLD;
  int found = 0, between = 0, code = 0;
  void *value = NULL;
  if (parent == MPI_COMM_NULL)
    return MLFAB__FAIL(error, MLFAB_ERR_CONFIG, "mpi: the communicator is MPI_COMM_NULL");
  MPI_Comm_test_inter(parent, &between);
  if (between)
    return MLFAB__FAIL(error, MLFAB_ERR_CONFIG, "mpi: the communicator is an intercommunicator");
  pthread_mutex_lock(&mpi_lock);
  if (mpi_keyval != MPI_KEYVAL_INVALID) MPI_Comm_get_attr(parent, mpi_keyval, &value, &found);
  if (found)
    *engine_p = value;
  else
    code = mpi_make_engine(parent, timeout_ns, engine_p, error);
  pthread_mutex_unlock(&mpi_lock);
  if (!code && (*engine_p)->spoilt)
    code = MLFAB__FAIL(error, MLFAB_ERR_STATE,
                       "mpi: %s not taken part in an earlier mlfab_open over this communicator, so "
                       "it cannot be used again",
                       (*engine_p)->missing);
  return code;
}

/* ---- the processes and their roles ---- */

/* The data that every process sends the others. Members from `protocol` on must be equal. */
typedef struct mpi_card {
  uint64_t end; /* the number of its end */
  uint64_t roles;
  uint64_t code; /* not 0: this process cannot open */
  uint64_t protocol, job, transports, servers, dedicated, scheduler;
} mpi_card;

enum { MPT_CARD_WORDS = sizeof(mpi_card) / sizeof(uint64_t), MPT_CARD_EQUAL = 3 };

static const char *const mpi_card_names[MPT_CARD_WORDS - MPT_CARD_EQUAL] = {
    "MLFAB_PROTOCOL", "job", "transports", "servers", "dedicated", "scheduler"};

static mpi_card mpi_make_card(const mlfab_config *c, int code, uint32_t end) {
  mpi_card card = {.end = end, .roles = c->roles, .code = (uint64_t)(code != 0)};
  card.protocol = MLFAB_PROTOCOL;
  for (const char *at = c->job[0] ? c->job : "mlfab"; *at; at++)
    card.job = mlfab__mix(card.job ^ (uint8_t)*at);
  card.transports = c->transports;
  card.servers = c->servers;
  card.dedicated = c->dedicated;
  card.scheduler = c->scheduler;
  return card;
}

/* Compares the cards. Finds the first process that failed or has other settings than MPI rank 0. */
static int mpi_compare(const mpi_card *cards, int size, mlfab_error *error) {
  for (int r = 0; r < size; r++) {
    if (cards[r].code)
      return MLFAB__FAIL(error, MLFAB_ERR_WORLD, "mpi: MPI rank %d cannot open: see its error", r);
  }
  for (int r = 1; r < size; r++) {
    uint64_t first[MPT_CARD_WORDS], other[MPT_CARD_WORDS];
    memcpy(first, &cards[0], sizeof first);
    memcpy(other, &cards[r], sizeof other);
    for (int i = MPT_CARD_EQUAL; i < MPT_CARD_WORDS; i++) {
      const char *name = mpi_card_names[i - MPT_CARD_EQUAL];
      if (first[i] == other[i]) continue;
      if (!strcmp(name, "job"))
        return MLFAB__FAIL(error, MLFAB_ERR_JOB, "mpi: MPI ranks 0 and %d have different jobs", r);
      return MLFAB__FAIL(error, MLFAB_ERR_WORLD,
                         "mpi: the configurations differ: %s is %llu at MPI rank 0, %llu at %d",
                         name, (unsigned long long)first[i], (unsigned long long)other[i], r);
    }
  }
  return 0;
}

/* Gives this role to the last `count` processes without a role. */
static void mpi_give_roles(mpi_card *cards, int size, uint32_t count, uint32_t role) {
  for (int r = size - 1; r >= 0 && count > 0; r--) {
    if (cards[r].roles) continue;
    cards[r].roles = role;
    count--;
  }
}

static uint32_t mpi_count_roles(const mpi_card *cards, int size, uint32_t role) {
  uint32_t count = 0;
  for (int r = 0; r < size; r++) count += cards[r].roles == role;
  return count;
}

/* Writes the ranks with this role: ": MPI ranks 0, 1"; "" if there are none. */
static const char *mpi_name_roles(const mpi_card *cards, int size, uint32_t role, char text[128]) {
  char list[96] = "";
  uint32_t n = 0;
  for (int r = 0; r < size; r++) {
    if (cards[r].roles == role) mpi_list(list, sizeof list, r, n++);
  }
  text[0] = 0;
  if (n > 0) snprintf(text, 128, n == 1 ? ": MPI rank %s" : ": MPI ranks %s", list);
  return text;
}

/* Decides the role of every process. With `dedicated` or a separate scheduler, it writes roles into the cards. */
static int mpi_cast(mpi_card *cards, int size, mlfab_config *c, mlfab_error *error) {
  uint32_t own = c->scheduler == MLFAB_SCHEDULER_OWN, servers = 0;
  char who[128];
  if (own && mpi_count_roles(cards, size, MLFAB_ROLE_SCHEDULER) == 0)
    mpi_give_roles(cards, size, 1, MLFAB_ROLE_SCHEDULER);
  if (mpi_count_roles(cards, size, MLFAB_ROLE_SCHEDULER) != own)
    return MLFAB__FAIL(error, MLFAB_ERR_CONFIG,
                       "mpi: %u processes have the role scheduler; with `scheduler` own it is one, "
                       "else none%s",
                       mpi_count_roles(cards, size, MLFAB_ROLE_SCHEDULER),
                       mpi_name_roles(cards, size, MLFAB_ROLE_SCHEDULER, who));
  if (c->dedicated) {
    servers = mpi_count_roles(cards, size, MLFAB_ROLE_SERVER);
    if (servers == 0) {
      mpi_give_roles(cards, size, c->servers ? c->servers : 1, MLFAB_ROLE_SERVER);
      servers = mpi_count_roles(cards, size, MLFAB_ROLE_SERVER);
    }
    if (c->servers && servers != c->servers)
      return MLFAB__FAIL(error, MLFAB_ERR_CONFIG,
                         "mpi: servers is %u, and %u processes have the role server%s", c->servers,
                         servers, mpi_name_roles(cards, size, MLFAB_ROLE_SERVER, who));
    c->servers = servers;
  }
  if (servers + own >= (uint32_t)size)
    return MLFAB__FAIL(error, MLFAB_ERR_CONFIG,
                       "mpi: of %d processes %u are servers and %u schedulers: no worker is left",
                       size, servers, own);
  c->workers = (uint32_t)size - servers - own;
  return 0;
}

/* Fills in rank, roles and coordinator. Numbers follow the order of MPI ranks, role by role. */
static int mpi_number(const mpi_card *cards, const mpi_engine *e, mlfab_config *c) {
  int first = -1;
  uint32_t before = 0, mine = (uint32_t)cards[e->rank].roles;
  int apart = c->dedicated || c->scheduler == MLFAB_SCHEDULER_OWN;
  if (apart && !mine) mine = MLFAB_ROLE_WORKER;
  for (int r = e->size - 1; r >= 0; r--) {
    uint32_t role = (uint32_t)cards[r].roles;
    int works = role != MLFAB_ROLE_SCHEDULER && !(c->dedicated && role == MLFAB_ROLE_SERVER);
    int same = c->dedicated && mine == MLFAB_ROLE_SERVER ? role == MLFAB_ROLE_SERVER : works;
    if (mine == MLFAB_ROLE_SCHEDULER) same = 0;
    before += r < e->rank && same;
    if (c->dedicated ? role == MLFAB_ROLE_SERVER : works) first = r;
  }
  c->rank = (int32_t)before;
  if (c->dedicated || mine == MLFAB_ROLE_SCHEDULER) c->roles = mine;
  snprintf(c->coordinator, sizeof c->coordinator, "mpi:%d/%llu", first,
           (unsigned long long)cards[first].end);
  if (!c->listen[0])
    snprintf(c->listen, sizeof c->listen, "mpi:%d/%llu", e->rank,
             (unsigned long long)cards[e->rank].end);
  return 0;
}

/* Refuses settings that MPI excludes. */
static int mpi_check_config(const mlfab_config *c, int level, mlfab_error *error) {
  if (c->join || c->workers_max > 0 || c->servers_max > 0 || c->replicas)
    return MLFAB__FAIL(error, MLFAB_ERR_UNSUPPORTED,
                       "mpi: the processes of an MPI job are fixed, and end together: `join`, "
                       "workers_max, servers_max and replicas need another transport");
  if (c->coordinator[0])
    return MLFAB__FAIL(
        error, MLFAB_ERR_CONFIG,
        "mpi: the processes find server 0 by themselves: `coordinator` (%.100s) must "
        "be empty",
        c->coordinator);
  if (c->progress == MLFAB_PROGRESS_THREAD && level < MPI_THREAD_MULTIPLE)
    return MLFAB__FAIL(error, MLFAB_ERR_CONFIG,
                       "mpi: a progress thread needs MPI_THREAD_MULTIPLE, and MPI was initialised "
                       "at %s: set `progress` to hand",
                       mpi_level_name(level));
  return 0;
}

MLFAB__INTERNAL int mlfab__mpi_prepare(mlfab_config *c, mlfab_error *error) {
  int level = 0;
  mpi_engine *e = NULL;
  uint64_t timeout_ns = c->timeout_ns ? c->timeout_ns : 300 * MPT_SECOND_NS;
  uint64_t until = mlfab__add_sat(mlfab__monotonic(NULL), timeout_ns);
  int code = mpi_begin(&level, error);
  if (!code) code = mpi_get_engine(c->transport_user, timeout_ns, &e, error);
  if (code) return code;
  int wrong = mpi_check_config(c, level, error);
  mpi_card *cards = calloc((size_t)e->size + 1, sizeof *cards); /* the last: this process's */
  if (!cards) return MLFAB__FAIL(error, MLFAB_ERR_MEMORY, "mpi: out of memory");
  mpi_roll roll;
  code = mpi_roll_begin(&roll, e->comm, MPT_HERE + (int)(e->opens++ % MPT_HERES), error);
  if (code) {
    free(cards);
    return code;
  }
  pthread_mutex_lock(&e->lock);
  cards[e->size] = mpi_make_card(c, wrong, e->next_end++);
  MPI_Request request = MPI_REQUEST_NULL;
  int result = MPI_Iallgather(&cards[e->size], MPT_CARD_WORDS, MPI_UINT64_T, cards, MPT_CARD_WORDS,
                              MPI_UINT64_T, e->comm, &request);
  pthread_mutex_unlock(&e->lock);
  code = result == MPI_SUCCESS ? mpi_await(&request, until, &roll) : MLFAB_ERR_IO;
  if (code) { /* MPI may still write the cards: they stay */
    mlfab_error absent;
    code = mpi_absent(e, &roll, code, timeout_ns, wrong ? &absent : error);
  }
  mpi_roll_end(&roll);
  if (code) return wrong ? wrong : code;
  if (!wrong) wrong = mpi_compare(cards, e->size, error);
  if (!wrong) wrong = mpi_cast(cards, e->size, c, error);
  if (!wrong) wrong = mpi_number(cards, e, c);
  free(cards);
  if (!wrong && c->progress == MLFAB_PROGRESS_AUTO && level < MPI_THREAD_MULTIPLE)
    c->progress = MLFAB_PROGRESS_HAND;
  return wrong;
}

/* ---- the table ---- */

/* "mpi:<rank>/<end>" of this communicator. */
static bool mpi_parse(const mpi_engine *e, const char *address, int *rank_p, uint32_t *end_p) {
  unsigned rank, end;
  int n = 0;
  if (strncmp(address, "mpi:", 4) || address[4] < '0' || address[4] > '9') return false;
  if (sscanf(address + 4, "%9u/%9u%n", &rank, &end, &n) != 2 || address[4 + n]) return false;
  *rank_p = (int)rank;
  *end_p = end;
  return rank < (unsigned)e->size;
}

static int mpi_open(const mlfab_transport_options *options, void **self_p, char *address) {
  mlfab__env env;
  mpi_engine *e = NULL;
  int level, rank, code = mlfab__env_init(&env, options->env);
  uint32_t number = 0;
  if (code) return MLFAB__FAIL(options->error, code, "mpi: bad env");
  uint64_t timeout_ns = options->timeout_ns ? options->timeout_ns : 300 * MPT_SECOND_NS;
  code = mpi_begin(&level, options->error);
  if (!code) code = mpi_get_engine(options->user, timeout_ns, &e, options->error);
  if (code) return code;
  bool given = options->listen && options->listen[0];
  if (given && (!mpi_parse(e, options->listen, &rank, &number) || rank != e->rank))
    return MLFAB__FAIL(options->error, MLFAB_ERR_ADDRESS,
                       "mpi: MPI rank %d cannot listen at %.100s", e->rank, options->listen);
  mpi_end *t = mlfab__alloc(&env, sizeof *t);
  if (!t) return MLFAB__FAIL(options->error, MLFAB_ERR_MEMORY, "mpi: out of memory");
  pthread_condattr_t attributes;
  pthread_condattr_init(&attributes);
  pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
  pthread_cond_init(&t->wakes, &attributes);
  pthread_condattr_destroy(&attributes);
  t->env = env;
  t->engine = e;
  t->lends = options->lend != 0;
  t->timeout_ns = timeout_ns;
  pthread_mutex_lock(&e->lock);
  t->number = given ? number : e->next_end++;
  if (given && number >= e->next_end) e->next_end = number + 1;
  if (e->over) code = MLFAB_ERR_IO;
  if (!code && mpi_end_of(e, t->number)) code = MLFAB_ERR_ADDRESS_IN_USE;
  if (!code) {
    t->next = e->ends;
    e->ends = t;
  }
  pthread_mutex_unlock(&e->lock);
  if (code) {
    pthread_cond_destroy(&t->wakes);
    mlfab__free(&env, t, sizeof *t);
    return MLFAB__FAIL(options->error, code, "mpi: MPI rank %d cannot listen at %.100s", e->rank,
                       options->listen);
  }
  snprintf(address, 256, "mpi:%d/%u", e->rank, t->number);
  *self_p = t;
  return 0;
}

/* Waits until MPI has let go of the end's loans, at most until the deadline; then they lose their owner. The lock is
 * free between two looks. */
static void mpi_end_loans(mpi_end *t) {
  mpi_engine *e = t->engine;
  uint64_t until = mlfab__add_sat(mlfab__monotonic(NULL), t->timeout_ns), nap = MPT_NAP_LEAST_NS;
  while (t->lent > 0 && !e->over && mlfab__monotonic(NULL) < until) {
    mpi_progress(e);
    if (t->lent == 0) return;
    pthread_mutex_unlock(&e->lock);
    mpi_nap(nap);
    nap = mlfab__min(2 * nap, MPT_NAP_NS);
    pthread_mutex_lock(&e->lock);
  }
  for (int i = 0; i < e->operations_count; i++) {
    mpi_operation *operation = &e->operations[i];
    if (operation->lends != t) continue;
    operation->lends = NULL;
    if (!e->over)
      mlfab__log(&t->env, MLFAB_LOG_ERROR,
                 "mpi: close: MPI rank %d has not taken all bytes of a buffer, which must stay "
                 "unchanged until MPI_Finalize",
                 operation->peer);
  }
}

/* In a forked child the engine and its lock belong to the parent. */
static void mpi_shut(void *self) {
  mpi_end *t = self;
  mpi_engine *e = t->engine;
  bool here = getpid() == e->pid;
  if (here) {
    pthread_mutex_lock(&e->lock);
    while (t->links) mpi_close_link(t->links);
    mpi_end **at = &e->ends;
    while (*at != t) at = &(*at)->next;
    *at = t->next;
    mpi_progress(e);
    mpi_end_loans(t);
    if (!e->ends) mpi_drain(e, mlfab__monotonic(NULL) + MPT_LAST_NS, false);
    pthread_mutex_unlock(&e->lock);
    pthread_cond_destroy(&t->wakes);
  }
  for (mpi_link *link = t->links, *next; link; link = next) {
    next = link->next;
    mlfab__free(&t->env, link, sizeof *link);
  }
  if (t->sent) mlfab__free(&t->env, t->sent, t->sent_room * sizeof *t->sent);
  mlfab__env env = t->env;
  mlfab__free(&env, t, sizeof *t);
}

static int mpi_reach(void *self, const char *address) {
  const mpi_end *t = self;
  int rank;
  uint32_t end;
  return mpi_parse(t->engine, address, &rank, &end);
}

static int mpi_connect(void *self, const char *address, uint64_t token) {
  mpi_end *t = self;
  mpi_engine *e = t->engine;
  int rank, code = 0;
  uint32_t end;
  if (!mpi_parse(e, address, &rank, &end)) return MLFAB_ERR_ADDRESS;
  pthread_mutex_lock(&e->lock);
  for (mpi_link *old = t->links; old; old = old->next) {
    /* A link that was made, but not yet reported, is as pending as a link that is still calling. */
    if (old->token != token || token == 0 || (old->peer_link && !old->fresh)) continue;
    mpi_close_link(old);
    break;
  }
  mpi_link *link = e->over ? NULL : mpi_new_link(t, rank, end);
  if (e->over) code = MLFAB_ERR_IO;
  if (!code && !link) code = MLFAB_ERR_MEMORY;
  if (!code) {
    link->token = token;
    t->calling++;
    mpi_envelope call = {.kind = MPT_CALL, .end = end, .from = link->number, .credit = t->number};
    mpi_tell(e, rank, &call);
  }
  pthread_mutex_unlock(&e->lock);
  return code;
}

static void mpi_disconnect(void *self, uint32_t number) {
  mpi_end *t = self;
  pthread_mutex_lock(&t->engine->lock);
  mpi_link *link = mpi_find(t, number);
  if (link) mpi_close_link(link);
  pthread_mutex_unlock(&t->engine->lock);
}

/* Makes room to record one more SENT. */
static bool mpi_reserve_sent(mpi_end *t) {
  if (t->sent_count + t->lent < t->sent_room) return true;
  uint32_t room = t->sent_room ? 2 * t->sent_room : 64;
  mpi_sent *sent = mlfab__alloc_array(&t->env, room, sizeof *sent);
  if (!sent) return false;
  for (uint32_t i = 0; i < t->sent_count; i++)
    sent[i] = t->sent[(t->sent_first + i) & (t->sent_room - 1)];
  if (t->sent) mlfab__free(&t->env, t->sent, t->sent_room * sizeof *sent);
  t->sent = sent;
  t->sent_first = 0;
  t->sent_room = room;
  return true;
}

/* Copies a frame into blocks and posts them. Errors: AGAIN (no memory). */
static int mpi_post_frame(mpi_link *link, const void *head, uint32_t head_bytes, const void *bulk,
                          uint32_t bulk_bytes, uint64_t token, bool lent) {
  mpi_engine *e = link->end->engine;
  uint32_t inside = bulk_bytes <= MPT_INLINE ? bulk_bytes : 0, behind = bulk_bytes - inside;
  uint32_t bytes = MPT_ENVELOPE + mpi_up8(head_bytes) + inside;
  mpi_block *first = mpi_reserve_operations(e, 2) ? mpi_take_block(e, bytes) : NULL;
  mpi_block *second = first && behind && !lent ? mpi_take_block(e, behind) : NULL;
  if (!first || (behind && !lent && !second)) {
    mpi_put_block(e, first);
    return MLFAB_ERR_AGAIN;
  }
  mpi_envelope envelope = {.kind = MPT_FRAME,
                           .to = link->peer_link,
                           .from = link->number,
                           .head_bytes = head_bytes,
                           .bulk_bytes = bulk_bytes,
                           .credit = link->owed};
  link->owed = 0;
  mpi_write(first->bytes, &envelope);
  memcpy(first->bytes + MPT_ENVELOPE, head, head_bytes);
  memset(first->bytes + MPT_ENVELOPE + head_bytes, 0, mpi_up8(head_bytes) - head_bytes);
  if (inside) memcpy(first->bytes + MPT_ENVELOPE + mpi_up8(head_bytes), bulk, inside);
  mpi_post_send(e, first, bytes, link->peer, MPT_HEADS);
  if (lent) mpi_post_loan(link, bulk, behind, token);
  if (!second) return 0;
  memcpy(second->bytes, bulk, behind);
  mpi_post_send(e, second, behind, link->peer, MPT_BULKS);
  return 0;
}

static int mpi_send_locked(mpi_end *t, uint32_t number, const void *head, uint32_t head_bytes,
                           const void *bulk, uint32_t bulk_bytes, uint64_t token, bool lent) {
  mpi_link *link = mpi_find(t, number);
  if (!link || link->ended || !link->peer_link) return MLFAB_ERR_PEER_CLOSED;
  if (head_bytes < MLFAB_HEADER_BYTES || head_bytes > MLFAB_HEADER_BYTES + MLFAB_META_MAX ||
      bulk_bytes > MLFAB_BULK_MAX)
    return MLFAB_ERR_LIMIT;
  if (bulk_bytes > 0 && !bulk) return MLFAB_ERR_ARGUMENT; /* a ghost */
  uint32_t cost = mpi_cost(head_bytes, bulk_bytes);
  int code = mpi_has_room(link, cost) ? 0 : MLFAB_ERR_AGAIN;
  int waits = code != 0; /* it waits for credit; else for memory */
  if (!code && token && !mpi_reserve_sent(t)) code = MLFAB_ERR_AGAIN;
  if (!code) code = mpi_post_frame(link, head, head_bytes, bulk, bulk_bytes, token, lent);
  if (code) {
    link->blocked = true;
    link->wants = cost;
    if (!waits) mpi_make_ready(link);
    return code;
  }
  link->unreleased += cost;
  if (token && !lent)
    t->sent[(t->sent_first + t->sent_count++) & (t->sent_room - 1)] = (mpi_sent){number, token};
  return 0;
}

static int mpi_send(void *self, uint32_t number, const void *head, uint32_t head_bytes,
                    const void *bulk, uint32_t bulk_bytes, uint64_t token) {
  mpi_end *t = self;
  pthread_mutex_lock(&t->engine->lock);
  int code = mpi_send_locked(t, number, head, head_bytes, bulk, bulk_bytes, token, false);
  pthread_mutex_unlock(&t->engine->lock);
  return code;
}

static int mpi_lend(void *self, uint32_t number, const void *head, uint32_t head_bytes,
                    const void *bulk, uint32_t bulk_bytes, uint64_t token) {
  mpi_end *t = self;
  bool lent = t->lends && token && bulk_bytes > MPT_INLINE;
  pthread_mutex_lock(&t->engine->lock);
  int code = mpi_send_locked(t, number, head, head_bytes, bulk, bulk_bytes, token, lent);
  pthread_mutex_unlock(&t->engine->lock);
  return code;
}

static uint32_t mpi_keeps(void *self, char *whom, size_t room) {
  mpi_end *t = self;
  mpi_engine *e = t->engine;
  uint32_t kept = atomic_load_explicit(&t->kept, memory_order_acquire);
  if (kept == 0 || !whom) return kept;
  pthread_mutex_lock(&e->lock);
  for (int i = e->operations_count - 1; i >= 0; i--) {
    const mpi_operation *operation = &e->operations[i];
    if (operation->lends == t && operation->link == 0)
      snprintf(whom, room, "MPI rank %d", operation->peer);
  }
  pthread_mutex_unlock(&e->lock);
  return kept;
}

static void mpi_flush(void *self) { (void)self; /* send gathers nothing */ }

/* Ends calls without an answer. On links that have ended it drops bulks that do not come: MPI moves a bulk only while
 * the sender's process calls MPI, too. */
static void mpi_look(mpi_end *t) {
  if (t->calling == 0 && t->ended == 0) return;
  uint64_t now = mlfab__monotonic(NULL);
  if (now - t->looked_ns < MPT_LOOK_NS) return;
  t->looked_ns = now;
  for (mpi_link *link = t->links; link; link = link->next) {
    if (link->ended && link->first && !link->first->whole && now - link->since_ns >= MPT_REST_NS) {
      mpi_drop_frames(link);
      mpi_make_ready(link);
    }
    if (!link->peer_link && now - link->since_ns >= MPT_ANSWER_NS)
      mpi_end_link(link, MLFAB_ERR_TIMEOUT, "no answer from");
  }
}

static int mpi_report_down(mpi_end *t, mpi_link *link, mlfab_io_event *event) {
  event->kind = MLFAB_IO_DOWN;
  event->code = link->code;
  if (link->peer_link) {
    event->link = link->number;
    snprintf(t->text, sizeof t->text,
             link->why == t->engine->why ? "mpi: the link to MPI rank %d ends: %s"
                                         : "mpi: MPI rank %d: %s",
             link->peer, link->why);
  } else {
    event->token = link->token;
    snprintf(t->text, sizeof t->text, "mpi: %s mpi:%d/%u", link->why, link->peer, link->peer_end);
  }
  event->text = t->text;
  mpi_free_link(link);
  return 1;
}

static void mpi_report_frame(mpi_link *link, mlfab_io_event *event) {
  mpi_block *head = link->first;
  link->first = head->next;
  event->kind = MLFAB_IO_FRAME;
  event->link = link->number;
  event->head = head->bytes + MPT_ENVELOPE;
  event->head_bytes = head->head_bytes;
  event->bulk_bytes = head->bulk_bytes;
  if (head->bulk_bytes)
    event->bulk =
        head->bulk ? head->bulk->bytes : head->bytes + MPT_ENVELOPE + mpi_up8(head->head_bytes);
  event->opaque = head;
}

/* Takes the next event of a ready link: UP first, DOWN last. Returns 0 if there is none left. */
static int mpi_report(mpi_end *t, mpi_link *link, mlfab_io_event *event) {
  if (link->fresh) {
    link->fresh = false;
    event->kind = MLFAB_IO_UP;
    event->link = link->number;
    event->token = link->token;
  } else if (link->first && link->first->whole) {
    mpi_report_frame(link, event);
  } else if (!link->first && link->ended) {
    return mpi_report_down(t, link, event);
  } else if (link->blocked && !link->ended && mpi_has_room(link, link->wants)) {
    link->blocked = false;
    event->kind = MLFAB_IO_WRITABLE;
    event->link = link->number;
  } else {
    return 0;
  }
  mpi_make_ready(link); /* at the end of the list: it may have more */
  return 1;
}

static int mpi_poll_locked(mpi_end *t, mlfab_io_event *event) {
  t->let_go = false;
  if (!t->ready_first && t->sent_count == 0) {
    mpi_progress(t->engine);
    mpi_look(t);
  }
  while (t->sent_count > 0) {
    mpi_sent sent = t->sent[t->sent_first];
    t->sent_first = (t->sent_first + 1) & (t->sent_room - 1);
    t->sent_count--;
    if (sent.link == 0) continue;
    event->kind = MLFAB_IO_SENT;
    event->link = sent.link;
    event->token = sent.token;
    return 1;
  }
  while (t->ready_first) {
    mpi_link *link = t->ready_first;
    t->ready_first = link->next_ready;
    if (!t->ready_first) t->ready_last = NULL;
    link->ready = false;
    if (mpi_report(t, link, event)) return 1;
  }
  return 0;
}

static int mpi_poll(void *self, mlfab_io_event *event) {
  mpi_end *t = self;
  *event = (mlfab_io_event){0};
  pthread_mutex_lock(&t->engine->lock);
  int found = mpi_poll_locked(t, event);
  pthread_mutex_unlock(&t->engine->lock);
  return found;
}

static void mpi_release(void *self, const mlfab_io_event *event) {
  mpi_end *t = self;
  mpi_block *head = event->opaque;
  if (!head) return;
  pthread_mutex_lock(&t->engine->lock);
  mpi_link *link = mpi_find(t, head->link);
  if (link && !link->ended) {
    link->owed += mpi_cost(head->head_bytes, head->bulk_bytes);
    if (link->owed >= MPT_WINDOW / 4) mpi_tell_link(link, MPT_CREDIT);
  }
  mpi_put_frame(t->engine, head);
  pthread_mutex_unlock(&t->engine->lock);
}

/* Bulks of `send` are copied: only loans come back. */
static int mpi_detach(void *self, uint32_t number, uint64_t token) {
  mpi_end *t = self;
  if (!t->lends) return 0;
  pthread_mutex_lock(&t->engine->lock);
  const mpi_link *link = mpi_find(t, number);
  if (link) mpi_take_back(link, token, false);
  pthread_mutex_unlock(&t->engine->lock);
  return 0;
}

/* Would poll find an event? */
static bool mpi_anything(mpi_end *t) {
  if (t->sent_count > 0 || t->ready_first || t->let_go) return true;
  mpi_progress(t->engine);
  mpi_look(t);
  return t->sent_count > 0 || t->ready_first || t->let_go;
}

static void mpi_wait(void *self, uint64_t timeout_ns) {
  mpi_end *t = self;
  uint64_t now = mlfab__monotonic(NULL), end = mlfab__add_sat(now, timeout_ns),
           nap = MPT_NAP_LEAST_NS;
  pthread_mutex_lock(&t->engine->lock);
  while (!t->woken && !mpi_anything(t) && now < end) {
    uint64_t until = now + mlfab__min(nap, end - now);
    struct timespec at = {(time_t)(until / MPT_SECOND_NS), (long)(until % MPT_SECOND_NS)};
    pthread_cond_timedwait(&t->wakes, &t->engine->lock, &at);
    nap = mlfab__min(2 * nap, MPT_NAP_NS);
    now = mlfab__monotonic(NULL);
  }
  t->woken = false;
  pthread_mutex_unlock(&t->engine->lock);
}

static void mpi_wake(void *self) {
  mpi_end *t = self;
  pthread_mutex_lock(&t->engine->lock);
  t->woken = true;
  pthread_cond_signal(&t->wakes);
  pthread_mutex_unlock(&t->engine->lock);
}

static int mpi_fd(void *self) {
  (void)self;
  return -1; /* MPI has none */
}

static int mpi_arm(void *self, int on) {
  mpi_end *t = self;
  if (!on) return 0;
  pthread_mutex_lock(&t->engine->lock);
  int found = t->woken || mpi_anything(t);
  t->woken = false;
  pthread_mutex_unlock(&t->engine->lock);
  return found;
}

/* When a process dies, MPI ends the job. So a silent process lives, or the whole job ends soon. */
static int mpi_probe(void *self, uint32_t number) {
  mpi_end *t = self;
  pthread_mutex_lock(&t->engine->lock);
  int lives = mpi_find(t, number) && !t->engine->over;
  pthread_mutex_unlock(&t->engine->lock);
  return lives ? 0 : MLFAB_ERR_AGAIN;
}

MLFAB_API const mlfab_transport *mlfab_transport_mpi(void) {
  static const mlfab_transport table = {
      .size = sizeof table,
      .abi = MLFAB_TRANSPORT_ABI,
      .name = "mpi",
      .caps = MLFAB_CAP_RELIABLE | MLFAB_CAP_CHECKED | MLFAB_CAP_PROBE,
      .open = mpi_open,
      .close = mpi_shut,
      .reach = mpi_reach,
      .connect = mpi_connect,
      .disconnect = mpi_disconnect,
      .send = mpi_send,
      .flush = mpi_flush,
      .poll = mpi_poll,
      .release = mpi_release,
      .detach = mpi_detach,
      .wait = mpi_wait,
      .wake = mpi_wake,
      .fd = mpi_fd,
      .arm = mpi_arm,
      .probe = mpi_probe,
      .lend = mpi_lend,
      .keeps = mpi_keeps};
  return &table;
}

#endif
