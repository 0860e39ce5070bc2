/* stream.c - sends and takes the reliable messages between the workers of one epoch. See stream.h. */
#include "stream.h"

enum { STREAM_RING = 16 }; /* messages of a lane's first ring */

typedef struct stream_message {
  mlfab__coll head; /* head of the first frame, without epoch and seq */
  const uint8_t *bytes;
  uint64_t n, cookie;
  uint64_t first, frames; /* numbers of its frames: first .. first + frames - 1 */
  uint32_t chunk;         /* most bytes in a frame */
  uint32_t lent;          /* number of frames with a bulk that the link has borrowed */
  uint8_t copied;
  uint8_t callers; /* the bytes belong to a caller */
  uint8_t counted; /* its eager bytes have been taken off the credit */
} stream_message;

/* One peer. Messages have serials: begin .. begin + count - 1, at serial % room in the ring. */
struct mlfab__lane {
  /* Towards it. */
  stream_message *ring;
  uint32_t room, count;   /* room: 0 or a power of two */
  uint64_t begin, cursor; /* cursor: message that holds frame `next`, or the next message */
  uint64_t queued;        /* number of frames of all messages so far */
  uint64_t next;          /* next frame to send; acked < next <= queued + 1 */
  uint64_t most;          /* highest frame that a link ever took */
  uint64_t acked;
  uint64_t eager, consumed; /* counted eager bytes; of them, bytes that the peer has consumed */
  uint64_t missing_ns;      /* time since the link is missing and wanted; 0: not known to be */
  int asking;               /* 1: a new link, and the peer has not yet reported its last frame */
  int parted;               /* the peer has said goodbye */
  /* From it. */
  uint64_t received, told; /* number of received frames, and of acknowledged frames */
  uint64_t in_eager, in_consumed, in_told;
  uint64_t bytes_since; /* bytes since the last acknowledgement */
  uint32_t frames_since;
};

MLFAB__INTERNAL void mlfab__streams_trim(mlfab__streams *streams) {
  if (streams->much) mlfab__pool_drain(&streams->pool);
  streams->much = 0;
}

/* --- streams --- */

/* Returns the member's number plus one, or 0. */
static uint32_t stream_place(const mlfab__streams *streams, uint32_t rank) {
  return streams->epoch && rank < streams->config->workers ? streams->member_of[rank] : 0;
}

static mlfab__lane *stream_of(const mlfab__streams *streams, uint32_t rank) {
  uint32_t place = stream_place(streams, rank);
  return place ? streams->streams[place - 1] : NULL;
}

static mlfab__lane *stream_open(mlfab__streams *streams, uint32_t member) {
  mlfab__lane *stream = streams->streams[member];
  if (stream) return stream;
  stream = mlfab__alloc(streams->env, sizeof *stream);
  if (!stream) return NULL;
  stream->begin = stream->cursor = streams->serial;
  stream->next = 1;
  streams->streams[member] = stream;
  return stream;
}

static stream_message *stream_at(const mlfab__lane *stream, uint64_t serial) {
  return &stream->ring[serial & (stream->room - 1)];
}

/* Frees a message. Its place in the ring may be another message's by now. */
static void stream_forget(mlfab__streams *streams, uint32_t rank, const stream_message *message,
                          uint64_t serial) {
  if (message->lent > 0) streams->links.detach(streams->links.self, rank, serial + 1);
  if (message->copied && message->n > 0)
    mlfab__pool_give(&streams->pool, (void *)(uintptr_t)message->bytes, message->n);
  streams->bytes_waiting -= message->n;
}

static void stream_close(mlfab__streams *streams, uint32_t member) {
  mlfab__lane *stream = streams->streams[member];
  if (!stream) return;
  uint64_t end = stream->begin + stream->count;
  for (uint64_t serial = stream->begin; serial < end; serial++)
    stream_forget(streams, streams->ranks[member], stream_at(stream, serial), serial);
  streams->serial = mlfab__max(streams->serial, end);
  mlfab__free(streams->env, stream->ring, stream->room * sizeof *stream->ring);
  mlfab__free(streams->env, stream, sizeof *stream);
  streams->streams[member] = NULL;
}

MLFAB__INTERNAL void mlfab__streams_init(mlfab__streams *streams, mlfab__env *env,
                                         const mlfab_config *config, const mlfab__port *links,
                                         const mlfab__port *down, const mlfab__stream_user *user) {
  memset(streams, 0, sizeof *streams);
  streams->env = env;
  streams->config = config;
  streams->links = *links;
  streams->down = *down;
  streams->user = *user;
  mlfab__pool_init(&streams->pool, env, UINT64_MAX);
}

MLFAB__INTERNAL void mlfab__streams_end(mlfab__streams *streams) {
  if (!streams->epoch) return;
  for (uint32_t m = 0; m < streams->members; m++) {
    stream_close(streams, m);
    streams->member_of[streams->ranks[m]] = 0;
  }
  assert(streams->bytes_waiting == 0);
  mlfab__free(streams->env, streams->streams, streams->members * sizeof(mlfab__lane *));
  streams->streams = NULL;
  streams->members = streams->epoch = 0;
}

MLFAB__INTERNAL int mlfab__streams_begin(mlfab__streams *streams, uint32_t epoch,
                                         const uint32_t *ranks, uint32_t members) {
  mlfab__streams_end(streams);
  streams->much = streams->pool.bytes > MLFAB__STREAM_POOL;
  if (!streams->member_of)
    streams->member_of =
        mlfab__alloc_array(streams->env, streams->config->workers, sizeof(uint32_t));
  if (!streams->member_of) return MLFAB_ERR_MEMORY;
  streams->streams = mlfab__alloc_array(streams->env, members, sizeof(mlfab__lane *));
  if (!streams->streams) return MLFAB_ERR_MEMORY;
  for (uint32_t m = 0; m < members; m++) streams->member_of[ranks[m]] = m + 1;
  streams->ranks = ranks;
  streams->members = members;
  streams->epoch = epoch;
  return 0;
}

MLFAB__INTERNAL void mlfab__streams_free(mlfab__streams *streams) {
  if (!streams->env) return;
  mlfab__streams_end(streams);
  mlfab__pool_drain(&streams->pool);
  mlfab__free(streams->env, streams->member_of, streams->config->workers * sizeof(uint32_t));
  streams->member_of = NULL;
}

/* --- to a peer --- */

/* Makes room for one more message: returns 1, or 0. */
static int stream_reserve(mlfab__streams *streams, mlfab__lane *stream) {
  if (stream->count < stream->room) return 1;
  uint32_t room = stream->room ? 2 * stream->room : STREAM_RING;
  if (room > MLFAB__STREAM_QUEUE_MAX) return 0;
  stream_message *ring = mlfab__alloc_array(streams->env, room, sizeof *ring);
  if (!ring) return 0;
  for (uint64_t serial = stream->begin; serial < stream->begin + stream->count; serial++)
    ring[serial & (room - 1)] = *stream_at(stream, serial);
  mlfab__free(streams->env, stream->ring, stream->room * sizeof *ring);
  stream->ring = ring;
  stream->room = room;
  return 1;
}

MLFAB__INTERNAL int mlfab__stream_send(mlfab__streams *streams, uint32_t member,
                                       const mlfab__coll *head, const void *bytes, uint64_t n,
                                       int how, uint64_t cookie) {
  const int copy = how == MLFAB__STREAM_KEEP_COPY;
  assert(streams->epoch && member < streams->members);
  assert(!(head->flags & MLFAB__COLL_EAGER) || n <= MLFAB__STREAM_CREDIT);
  mlfab__lane *stream = stream_open(streams, member);
  if (!stream || !stream_reserve(streams, stream)) return MLFAB_ERR_MEMORY;
  if (copy && n > 0) {
    uint8_t *own = mlfab__pool_take(&streams->pool, n);
    if (!own) return MLFAB_ERR_MEMORY;
    memcpy(own, bytes, n);
    bytes = own;
  }
  stream_message *message = stream_at(stream, stream->begin + stream->count++);
  memset(message, 0, sizeof *message);
  message->head = *head;
  message->bytes = bytes;
  message->n = n;
  message->cookie = cookie;
  message->first = stream->queued + 1;
  message->chunk =
      mlfab__port_chunk(&streams->links, streams->ranks[member], streams->config->chunk_bytes);
  message->frames = n > 0 ? (n - 1) / message->chunk + 1 : 1;
  message->copied = (uint8_t)copy;
  message->callers = how == MLFAB__STREAM_CALLERS;
  stream->queued += message->frames;
  streams->bytes_waiting += n;
  streams->links.ready(streams->links.self, streams->ranks[member]);
  return 0;
}

/* Returns 1 if the message waits until the peer consumes others. */
static int stream_waits(const mlfab__lane *stream, const stream_message *message) {
  return message->head.flags & MLFAB__COLL_EAGER && !message->counted &&
         stream->eager - stream->consumed + message->n > MLFAB__STREAM_CREDIT;
}

MLFAB__INTERNAL int mlfab__stream_next(mlfab__streams *streams, uint32_t rank,
                                       mlfab__frame_out *frame) {
  const mlfab__lane *stream = stream_of(streams, rank);
  if (!stream || stream->asking || stream->next > stream->queued) return 0;
  const stream_message *message = stream_at(stream, stream->cursor);
  if (stream_waits(stream, message)) return 0;
  uint64_t at = (stream->next - message->first) * message->chunk;
  mlfab__coll head = message->head;
  head.epoch = streams->epoch;
  head.seq = stream->next;
  head.offset += at;
  frame->type = MLFAB__COLL;
  frame->meta_bytes = mlfab__encode_coll(frame->meta, &head);
  frame->bulk_bytes = (uint32_t)mlfab__min(message->n - at, message->chunk);
  frame->bulk = frame->bulk_bytes ? message->bytes + at : NULL;
  int lends = mlfab__port_lends(&streams->links, rank, streams->config->chunk_bytes,
                                frame->bulk_bytes, MLFAB__STREAM_COPY);
  frame->token = lends ? stream->cursor + 1 : 0;
  frame->callers = message->callers;
  frame->slot = streams->epoch;
  frame->note[0] = stream->next;
  return 1;
}

/* Asks the peer to acknowledge the frames that it has. */
static void stream_ask(mlfab__streams *streams, uint32_t rank) {
  mlfab__coll question;
  memset(&question, 0, sizeof question);
  question.epoch = streams->epoch;
  MLFAB__POST(&streams->links, rank, MLFAB__COLL, coll, &question);
}

/* When all is sent, a leaving worker asks for the last acknowledgement. */
static void stream_ask_last(mlfab__streams *streams, uint32_t rank, const mlfab__lane *stream) {
  if (streams->leaving && stream->count > 0 && !stream->asking && stream->next > stream->queued)
    stream_ask(streams, rank);
}

MLFAB__INTERNAL void mlfab__streams_leave(mlfab__streams *streams) {
  streams->leaving = 1;
  for (uint32_t m = 0; m < streams->members; m++) {
    if (streams->streams[m]) stream_ask_last(streams, streams->ranks[m], streams->streams[m]);
  }
}

MLFAB__INTERNAL void mlfab__stream_parted(mlfab__streams *streams, uint32_t rank) {
  mlfab__lane *stream = stream_of(streams, rank);
  if (stream) stream->parted = 1;
}

MLFAB__INTERNAL void mlfab__stream_taken(mlfab__streams *streams, uint32_t rank,
                                         const mlfab__frame_out *frame) {
  mlfab__lane *stream = stream_of(streams, rank);
  if (!stream || frame->slot != streams->epoch || frame->note[0] != stream->next ||
      stream->asking) {
    /* The message was forgotten between `next` and `taken`. */
    if (frame->token) streams->links.detach(streams->links.self, rank, frame->token);
    return;
  }
  stream_message *message = stream_at(stream, stream->cursor);
  if (message->head.flags & MLFAB__COLL_EAGER && !message->counted) {
    message->counted = 1;
    stream->eager += message->n;
  }
  if (frame->token) message->lent++;
  stream->most = mlfab__max(stream->most, stream->next);
  if (++stream->next == message->first + message->frames) stream->cursor++;
  stream_ask_last(streams, rank, stream);
}

MLFAB__INTERNAL void mlfab__stream_sent(mlfab__streams *streams, uint32_t rank, uint64_t token) {
  uint64_t serial = token - 1;
  mlfab__lane *stream = stream_of(streams, rank);
  if (!stream || serial < stream->begin || serial - stream->begin >= stream->count) return;
  stream_message *message = stream_at(stream, serial);
  if (message->lent > 0) message->lent--;
}

/* Frees messages that are wholly acknowledged. The user may do anything in given_back. */
static void stream_acknowledged(mlfab__streams *streams, uint32_t rank, uint32_t epoch) {
  for (;;) {
    mlfab__lane *stream = streams->epoch == epoch ? stream_of(streams, rank) : NULL;
    if (!stream || stream->count == 0) return;
    stream_message message = *stream_at(stream, stream->begin);
    if (message.first + message.frames - 1 > stream->acked) return;
    stream_forget(streams, rank, &message, stream->begin);
    stream->begin++;
    stream->count--;
    stream->cursor = mlfab__max(stream->cursor, stream->begin);
    if (!message.copied)
      streams->user.given_back(streams->user.self, stream_place(streams, rank) - 1, message.cookie);
  }
}

MLFAB__INTERNAL int mlfab__stream_peer_frame(mlfab__streams *streams, uint32_t rank,
                                             const mlfab__frame_in *frame) {
  mlfab__coll_ack ack;
  if (frame->type != MLFAB__COLL_ACK) return 0;
  if (MLFAB__MALFORMED(&streams->links, rank, frame, coll_ack, &ack)) return 1;
  if (!streams->epoch || ack.epoch != streams->epoch) return 1;
  mlfab__lane *stream = stream_of(streams, rank);
  if (!stream || ack.received < stream->acked || ack.received > stream->most ||
      ack.consumed < stream->consumed || ack.consumed > stream->eager) {
    streams->links.drop(streams->links.self, rank, MLFAB_ERR_FRAME,
                        "an acknowledgement of frames never sent, or less than before");
    return 1;
  }
  stream->asking = 0;
  stream->acked = ack.received;
  stream->consumed = ack.consumed;
  stream->next = mlfab__max(stream->next, stream->acked + 1);
  if (stream->next <= stream->queued) streams->links.ready(streams->links.self, rank);
  stream_acknowledged(streams, rank, ack.epoch);
  return 1;
}

/* Sends again from the first frame that is not acknowledged: the link took its frames with it. */
static void stream_restart(mlfab__lane *stream) {
  uint64_t end = mlfab__min(stream->cursor + 1, stream->begin + stream->count);
  for (uint64_t serial = stream->begin; serial < end; serial++) stream_at(stream, serial)->lent = 0;
  stream->cursor = stream->begin;
  stream->next = stream->acked + 1;
}

MLFAB__INTERNAL void mlfab__stream_peer_up(mlfab__streams *streams, uint32_t rank) {
  mlfab__lane *stream = stream_of(streams, rank);
  if (!stream) return;
  stream_restart(stream);
  stream->missing_ns = 0;
  stream->asking = stream->most > stream->acked || stream->eager > stream->consumed;
  if (stream->asking) {
    stream_ask(streams, rank);
  } else if (stream->count > 0) {
    streams->links.ready(streams->links.self, rank);
  }
}

MLFAB__INTERNAL void mlfab__stream_peer_lost(mlfab__streams *streams, uint32_t rank) {
  mlfab__lane *stream = stream_of(streams, rank);
  if (stream) stream_restart(stream);
}

MLFAB__INTERNAL int mlfab__stream_peer_missing(mlfab__streams *streams, uint32_t rank,
                                               uint64_t now_ns, uint64_t *since_p) {
  mlfab__lane *stream = stream_of(streams, rank);
  if (since_p) *since_p = now_ns;
  if (!stream) return 0;
  if (stream->count == 0) {
    stream->missing_ns = 0;
    return 0;
  }
  if (stream->missing_ns == 0) stream->missing_ns = now_ns;
  if (since_p) *since_p = stream->missing_ns;
  return 1;
}

MLFAB__INTERNAL void mlfab__streams_awake(mlfab__streams *streams, uint64_t late_ns,
                                          uint64_t now_ns) {
  for (uint32_t i = 0; streams->epoch && i < streams->members; i++)
    if (streams->streams[i]) mlfab__later(&streams->streams[i]->missing_ns, late_ns, now_ns);
}

/* --- from a peer --- */

static void stream_acknowledge(mlfab__streams *streams, uint32_t rank, mlfab__lane *stream) {
  mlfab__coll_ack ack = {streams->epoch, stream->received, stream->in_consumed};
  stream->told = stream->received;
  stream->in_told = stream->in_consumed;
  stream->frames_since = 0;
  stream->bytes_since = 0;
  MLFAB__POST(&streams->down, rank, MLFAB__COLL_ACK, coll_ack, &ack);
}

MLFAB__INTERNAL void mlfab__stream_consumed(mlfab__streams *streams, uint32_t member,
                                            uint64_t bytes) {
  mlfab__lane *stream = streams->streams[member];
  stream->in_consumed += bytes;
  assert(stream->in_consumed <= stream->in_eager);
  if (stream->in_consumed - stream->in_told >= MLFAB__STREAM_CREDIT / 4)
    stream_acknowledge(streams, streams->ranks[member], stream);
}

/* Returns a text if the next frame is wrong, else NULL. */
static const char *stream_wrong(const mlfab__lane *stream, const mlfab__coll *head,
                                const mlfab__frame_in *frame) {
  uint64_t n = frame->bulk_bytes;
  if (head->seq != stream->received + 1) return "a collective's frame came before others";
  if (head->offset > head->total || n > head->total - head->offset)
    return "a collective's bytes beyond its end";
  if (n > 0 && !frame->bulk) return "a collective's frame without its bytes";
  if (head->flags & MLFAB__COLL_READY && head->total > 0) return "a READY with bytes";
  if (head->flags & MLFAB__COLL_EAGER &&
      stream->in_eager - stream->in_consumed + n > MLFAB__STREAM_CREDIT)
    return "more eager bytes than there is credit for";
  return NULL;
}

MLFAB__INTERNAL int mlfab__stream_member_frame(mlfab__streams *streams, uint32_t rank,
                                               const mlfab__frame_in *frame) {
  mlfab__coll head;
  const mlfab__port *down = &streams->down;
  if (frame->type != MLFAB__COLL) return 0;
  if (MLFAB__MALFORMED(down, rank, frame, coll, &head)) return 1;
  if (!streams->epoch || head.epoch != streams->epoch) return 1;
  uint32_t place = stream_place(streams, rank);
  mlfab__lane *stream = place ? stream_open(streams, place - 1) : NULL;
  if (!stream) {
    down->drop(down->self, rank, place ? MLFAB_ERR_MEMORY : MLFAB_ERR_FRAME,
               place ? "out of memory" : "a collective's frame of a worker that is no member");
    return 1;
  }
  if (head.seq <= stream->received) {
    stream_acknowledge(streams, rank, stream);
    return 1;
  }
  const char *wrong = stream_wrong(stream, &head, frame);
  if (wrong) {
    down->drop(down->self, rank, MLFAB_ERR_FRAME, wrong);
    return 1;
  }
  stream->received++;
  stream->frames_since++;
  stream->bytes_since += frame->bulk_bytes;
  if (head.flags & MLFAB__COLL_EAGER) stream->in_eager += frame->bulk_bytes;
  int last = head.offset + frame->bulk_bytes == head.total && head.total > MLFAB__STREAM_LEND;
  if (last || stream->frames_since >= MLFAB__STREAM_ACK_FRAMES ||
      stream->bytes_since >= MLFAB__STREAM_ACK_BYTES)
    stream_acknowledge(streams, rank, stream);
  /* This is the last action: the user may end the epoch. */
  streams->user.deliver(streams->user.self, place - 1, &head, frame->bulk, frame->bulk_bytes);
  return 1;
}

/* --- all of them --- */

MLFAB__INTERNAL void mlfab__streams_tick(mlfab__streams *streams) {
  for (uint32_t m = 0; m < streams->members; m++) {
    mlfab__lane *stream = streams->streams[m];
    if (stream && (stream->told != stream->received || stream->in_told != stream->in_consumed))
      stream_acknowledge(streams, streams->ranks[m], stream);
  }
}

MLFAB__INTERNAL int mlfab__streams_quiet(const mlfab__streams *streams) {
  for (uint32_t m = 0; m < streams->members; m++) {
    const mlfab__lane *stream = streams->streams[m];
    if (stream && stream->count > 0 && !stream->parted) return 0;
  }
  return 1;
}
