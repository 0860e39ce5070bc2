/* conform.h - the requirements on every transport, as one list of checks (mlfab_transport.h).
 *
 * A program lists its transports as `struct conform_transport` and calls conform_run: one entry gives a new
 * transport all checks (test_conform.c). Several transports are checked side by side, each in a process of its own. Only the public header is used, and frames are sealed
 * by the few lines below, so that a program may link the shipped mlfab.c, and the library's wire format is
 * compared with a second implementation.
 *
 * A world has some ends, each an opened transport; `conform_pump` lets all of them work and records their
 * events. Frames belong to streams. Size and bytes of a frame follow from the stream's number and the
 * frame's, so the receiver knows what to expect: each frame must be the next one of its link, bit for bit.
 * The sender overwrites its memory as soon as the contract returns it.
 *
 * MLFAB_SCALE scales the long checks: 100 is everything, 1 the default. With CONFORM_FIRST in the environment a program
 * skips what follows the first failure. */
#ifndef MLFAB_CONFORM_H
#define MLFAB_CONFORM_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1
#endif
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "../../mlfab_transport.h"
#include "../unit/chance.h"
#include "../unit/scale.h"

enum {
  CONFORM_SOCKETS = 1, /* strangers can connect: see `stranger` */
  CONFORM_WAITS = 2,   /* has wait, wake, fd and arm (time passes by itself) */
  CONFORM_SAME = 4,    /* the code of another one in the list, with other addresses: fewer frames */
  CONFORM_ALONE = 8,   /* it cannot work in a process of its own */
  CONFORM_ENDS = 51,
  CONFORM_LINKS = 64,    /* of an end in one check, open or not */
  CONFORM_IN_FLIGHT = 96 /* borrowed frames of a stream */
};

#define CONFORM_KEY "a key of the conformance suite"
#define CONFORM_PATIENCE 120000000000u

struct conform_world;

typedef struct conform_transport {
  const char *name;
  const mlfab_transport *table; /* NULL: every check is skipped, for the reason in `missing` */
  const char *missing;
  uint32_t flags;
  uint32_t neighbours; /* as in mlfab_transport_options */
  /* Each may be NULL. listen: the address at which end `i` listens (256 bytes); default "". begin and
   * finish: run around every check; begin may set world->user. host: transport_user of end `i`. step: lets
   * time pass where it does not by itself. end: how an end dies; default its close. stranger: a blocking
   * socket connected to this address. */
  void (*listen)(struct conform_world *world, int i, char *address);
  void (*begin)(struct conform_world *world);
  void (*finish)(struct conform_world *world);
  void *(*host)(struct conform_world *world, int i);
  void (*step)(struct conform_world *world);
  void (*kill)(struct conform_world *world, int i);
  int (*stranger)(const char *address);
} conform_transport;

typedef struct conform_link {
  uint32_t id;
  uint64_t token; /* of UP */
  int down, blocked, writables;
  int32_t code;
  char text[400];
  uint64_t stream, next; /* received so far: the stream's number, its next frame */
  int announced;         /* the header of the next frame was reported: `header` */
  uint8_t header[MLFAB_HEADER_BYTES];
} conform_link;

typedef struct conform_flight {
  uint64_t token;
  uint8_t *bulk;
  uint32_t bulk_bytes;
} conform_flight;

/* Frames 0 to count - 1 of stream `number`, sent over one link. */
typedef struct conform_stream {
  struct conform_end *end;
  conform_link *link;
  uint64_t number, next, count;
  conform_flight flights[CONFORM_IN_FLIGHT];
} conform_stream;

typedef struct conform_end {
  struct conform_world *world;
  void *self;
  char address[256];
  mlfab_env env;
  mlfab_error error;
  uint64_t allocations;
  int64_t bytes; /* currently allocated */
  int measured;
  conform_link links[CONFORM_LINKS];
  int link_count;
  uint64_t frames, refused, events;
  int32_t refused_code;
  char refused_text[400];
  uint64_t failed_token; /* of the last DOWN without a link */
  uint32_t failures;
  int32_t failed_code;
  char failed_text[400];
  conform_stream *streams[CONFORM_LINKS];
  int hold; /* number of frames to keep unreleased */
  mlfab_io_event held[16];
  int held_count;
} conform_end;

typedef struct conform_world {
  const conform_transport *transport;
  const mlfab_transport *table;
  conform_end ends[CONFORM_ENDS];
  void *user;
} conform_world;

/* --- frames ----------------------------------------------------------------------------------- */

enum { CONFORM_TINY, CONFORM_MIXED, CONFORM_CHUNKS, CONFORM_BIG, CONFORM_SMALL, CONFORM_PROFILES };
#define CONFORM_STREAM(number, profile) ((uint64_t)(number)*CONFORM_PROFILES + (uint64_t)(profile))

static double conform_share = 1.0; /* of the usual number of frames and rounds */

static inline uint64_t conform_count(double full, uint64_t least) {
  return test_cases_from((uint64_t)((double)least * conform_share), full / 100 * conform_share);
}

/* CRC-32C, eight bytes at a time: table[k] has the checksums of a byte before k zeros. */
static inline uint32_t conform_crc(uint32_t crc, const uint8_t *data, size_t bytes) {
  static uint32_t table[8][256];
  if (!table[0][1]) {
    for (uint32_t i = 0; i < 256; i++) {
      uint32_t c = i;
      for (int k = 0; k < 8; k++) c = c & 1 ? c >> 1 ^ 0x82f63b78u : c >> 1;
      table[0][i] = c;
    }
    for (int k = 1; k < 8; k++)
      for (uint32_t i = 0; i < 256; i++)
        table[k][i] = table[k - 1][i] >> 8 ^ table[0][table[k - 1][i] & 255];
  }
  crc = ~crc;
  for (; bytes >= 8; bytes -= 8, data += 8) {
    const uint32_t low = crc ^ ((uint32_t)data[0] | (uint32_t)data[1] << 8 |
                                (uint32_t)data[2] << 16 | (uint32_t)data[3] << 24);
    crc = table[7][low & 255] ^ table[6][low >> 8 & 255] ^ table[5][low >> 16 & 255] ^
          table[4][low >> 24] ^ table[3][data[4]] ^ table[2][data[5]] ^ table[1][data[6]] ^
          table[0][data[7]];
  }
  for (; bytes > 0; bytes--, data++) crc = crc >> 8 ^ table[0][(crc ^ *data) & 255];
  return ~crc;
}

static inline void conform_put(uint8_t *at, uint64_t value, int bytes) {
  for (int i = 0; i < bytes; i++) at[i] = (uint8_t)(value >> (8 * i));
}

static inline uint64_t conform_get(const uint8_t *at) {
  uint64_t value = 0;
  for (int i = 0; i < 8; i++) value |= (uint64_t)at[i] << (8 * i);
  return value;
}

/* The header of wire.h before the meta at head + 64. crc_bulk: the checksum covers the bulk. */
static inline void conform_seal(uint8_t *head, uint32_t meta_bytes, const uint8_t *bulk,
                                uint32_t bulk_bytes, int crc_bulk) {
  memset(head, 0, 64);
  memcpy(head, "MLFB", 4);
  head[4] = MLFAB_PROTOCOL;
  head[5] = 12; /* CHUNK, which may have a bulk */
  head[6] = (uint8_t)(crc_bulk != 0);
  conform_put(head + 16, meta_bytes, 4);
  conform_put(head + 20, bulk_bytes, 4);
  uint32_t crc = conform_crc(0, head + 64, meta_bytes);
  if (crc_bulk) crc = conform_crc(crc, bulk, bulk_bytes);
  conform_put(head + 12, crc, 4);
  conform_put(head + 8, conform_crc(0, head, 64), 4);
}

typedef struct conform_frame {
  uint8_t *head, *bulk;
  uint32_t head_bytes, bulk_bytes;
  int copied; /* sent with token 0 */
} conform_frame;

static inline void conform_fill(uint8_t *at, size_t bytes, uint64_t seed) {
  uint64_t word = seed * 0x9e3779b97f4a7c15u;
  size_t i = 0;
  for (; i + 8 <= bytes; i += 8, word += 8 * 0x9e3779b97f4a7c15u) memcpy(at + i, &word, 8);
  memcpy(at + i, &word, bytes - i);
}

static inline void conform_frame_make(uint64_t stream, uint64_t number, conform_frame *frame) {
  uint64_t r = mix(stream * 1000003 + number), profile = stream % CONFORM_PROFILES;
  uint32_t meta = 16 + (uint32_t)(r >> 8) % 100, bulk = 0;
  if (profile == CONFORM_SMALL) bulk = 1 + (uint32_t)(r >> 16) % 2000;
  if (profile == CONFORM_CHUNKS) bulk = 262144;
  if (profile == CONFORM_BIG) bulk = MLFAB_BULK_MAX;
  if (profile == CONFORM_MIXED) switch (r % 16) {
      case 8:
      case 9:
      case 10:
        bulk = 1 + (uint32_t)(r >> 16) % 8200;
        break;
      case 11:
        bulk = 8185 + (uint32_t)(r >> 16) % 16;
        break;
      case 12:
        meta = 16 + (uint32_t)(r >> 16) % (MLFAB_META_MAX - 15);
        break;
      case 13:
        bulk = 262136 + (uint32_t)(r >> 16) % 16;
        break;
      case 14:
        bulk = (uint32_t)(r >> 16) % 100000;
        break;
      case 15:
        bulk = r >> 60 ? 65536 : MLFAB_BULK_MAX - (uint32_t)(r >> 16) % 3;
        break;
      default:
        break;
    }
  if (number == 0) { /* the first frame of a connection is small */
    meta = 16 + (uint32_t)(r >> 8) % 100;
    bulk = 0;
  }
  frame->head_bytes = 64 + meta;
  frame->bulk_bytes = bulk;
  frame->copied = !bulk || (r >> 40) % 5 == 0;
  frame->head = malloc(frame->head_bytes);
  frame->bulk = bulk ? malloc(bulk) : NULL;
  assert_true(frame->head && (!bulk || frame->bulk));
  conform_fill(frame->head + 64, meta, r);
  conform_put(frame->head + 64, stream, 8);
  conform_put(frame->head + 72, number, 8);
  if (bulk) conform_fill(frame->bulk, bulk, r);
  conform_seal(frame->head, meta, frame->bulk, bulk, bulk && (r >> 44) % 2);
}

static inline void conform_scribble_free(void *memory, size_t bytes) {
  if (memory) memset(memory, 0xEE, bytes);
  free(memory);
}

/* Compares an event with the expected frame. */
static inline void conform_frame_expect(const mlfab_io_event *event, uint64_t stream,
                                        uint64_t number) {
  conform_frame frame;
  conform_frame_make(stream, number, &frame);
  assert_int_equal(event->head_bytes, frame.head_bytes);
  assert_int_equal(event->bulk_bytes, frame.bulk_bytes);
  assert_int_equal((uintptr_t)event->head % 8, 0);
  assert_int_equal((uintptr_t)event->bulk % 8, 0);
  assert_memory_equal(event->head, frame.head, frame.head_bytes);
  if (frame.bulk) assert_memory_equal(event->bulk, frame.bulk, frame.bulk_bytes);
  free(frame.head);
  free(frame.bulk);
}

/* --- the env: counts allocations ---------------------------------------------------------------- */

static inline void *conform_allocate(void *user, size_t bytes) {
  conform_end *end = user;
  end->allocations++;
  end->bytes += (int64_t)bytes;
  return malloc(bytes);
}

static inline void conform_release(void *user, void *memory, size_t bytes) {
  conform_end *end = user;
  end->bytes -= (int64_t)bytes;
  free(memory);
}

static inline uint64_t conform_now(void *user) {
  struct timespec now;
  (void)user;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static inline void conform_log(void *user, int level, const char *line) {
  (void)user, (void)level, (void)line;
}

/* --- ends ------------------------------------------------------------------------------------- */

static inline void conform_end_open(conform_world *world, int i) {
  conform_end *end = &world->ends[i];
  const conform_transport *transport = world->transport;
  char listen[256] = "";
  assert_null(end->self);
  memset(end, 0, sizeof *end);
  end->world = world;
  end->env = (mlfab_env){.size = sizeof end->env,
                         .log_level = MLFAB_LOG_WARN,
                         .user = end,
                         .allocate = conform_allocate,
                         .release = conform_release,
                         .clock = conform_now,
                         .log = conform_log};
  if (transport->listen) transport->listen(world, i, listen);
  mlfab_transport_options options = {.size = sizeof options,
                                     .keyed = 1,
                                     .key = CONFORM_KEY,
                                     .listen = listen,
                                     .ifname = "",
                                     .job = "conform",
                                     .neighbours = transport->neighbours,
                                     .env = &end->env,
                                     .user = transport->host ? transport->host(world, i) : NULL,
                                     .error = &end->error};
  int status = world->table->open(&options, &end->self, end->address);
  if (status) fail_msg("open: %d %s", status, end->error.text);
  assert_non_null(end->self);
}

static inline void conform_end_close(conform_end *end) {
  if (!end->self) return;
  while (end->held_count) /* they may be kept until after everything but close */
    end->world->table->release(end->self, &end->held[--end->held_count]);
  end->world->table->close(end->self);
  end->self = NULL;
  assert_int_equal(end->bytes, 0);
}

static inline void conform_kill(conform_world *world, int i) {
  if (!world->transport->kill) {
    conform_end_close(&world->ends[i]);
    return;
  }
  world->transport->kill(world, i);
  world->ends[i].self = NULL;
}

static inline conform_link *conform_link_of(conform_end *end, uint32_t id) {
  for (int i = end->link_count; i-- > 0;)
    if (end->links[i].id == id) return &end->links[i];
  return NULL;
}

/* The link that answers connect `token`, or (token 0) the n-th accepted one. */
static inline conform_link *conform_link_by(conform_end *end, uint64_t token, int n) {
  for (int i = 0; i < end->link_count; i++)
    if (end->links[i].token == token && n-- == 0) return &end->links[i];
  return NULL;
}

/* --- streams ---------------------------------------------------------------------------------- */

static inline conform_stream *conform_stream_begin(conform_end *end, conform_link *link,
                                                   uint64_t number, uint64_t count) {
  conform_stream *stream = calloc(1, sizeof *stream);
  assert_non_null(stream);
  stream->end = end;
  stream->link = link;
  stream->number = number;
  stream->count = count;
  for (int i = 0; i < CONFORM_LINKS; i++)
    if (!end->streams[i]) {
      end->streams[i] = stream;
      return stream;
    }
  fail_msg("too many streams");
  return NULL;
}

static inline void conform_flight_end(conform_flight *flight) {
  conform_scribble_free(flight->bulk, flight->bulk_bytes);
  memset(flight, 0, sizeof *flight);
}

static inline int conform_in_flight(const conform_stream *stream) {
  int n = 0;
  for (int i = 0; i < CONFORM_IN_FLIGHT; i++) n += stream->flights[i].token != 0;
  return n;
}

static inline void conform_stream_end(conform_stream *stream) {
  for (int i = 0; i < CONFORM_IN_FLIGHT; i++) conform_flight_end(&stream->flights[i]);
  for (int i = 0; i < CONFORM_LINKS; i++)
    if (stream->end->streams[i] == stream) stream->end->streams[i] = NULL;
  free(stream);
}

/* Sends the next frame. Returns 0 or send's code. Overwrites what the contract returns at once. */
static inline int conform_stream_send(conform_stream *stream) {
  conform_end *end = stream->end;
  conform_frame frame;
  conform_flight *flight = stream->flights;
  while (flight < stream->flights + CONFORM_IN_FLIGHT && flight->token) flight++;
  if (flight == stream->flights + CONFORM_IN_FLIGHT) return 1; /* the check's own limit */
  conform_frame_make(stream->number, stream->next, &frame);
  uint64_t token = frame.copied ? 0 : stream->number << 32 | (stream->next + 1);
  if (!frame.copied) /* SENT cannot arrive before this */
    *flight = (conform_flight){token, frame.bulk, frame.bulk_bytes};
  int status = end->world->table->send(end->self, stream->link->id, frame.head, frame.head_bytes,
                                       frame.bulk, frame.bulk_bytes, token);
  conform_scribble_free(frame.head, frame.head_bytes);
  if (frame.copied) conform_scribble_free(frame.bulk, frame.bulk_bytes);
  if (status && !frame.copied) conform_flight_end(flight);
  if (!status) stream->next++;
  if (status == MLFAB_ERR_AGAIN) stream->link->blocked = 1;
  return status;
}

/* Sends as much as possible. After a refusal it waits for WRITABLE. */
static inline void conform_streams_go(conform_end *end) {
  for (int i = 0; i < CONFORM_LINKS; i++) {
    conform_stream *stream = end->streams[i];
    for (int n = 0; stream && stream->next < stream->count && !stream->link->blocked &&
                    !stream->link->down && n < 100;
         n++) {
      int status = conform_stream_send(stream);
      if (status == 1 || status == MLFAB_ERR_AGAIN || status == MLFAB_ERR_PEER_CLOSED) break;
      assert_int_equal(status, 0);
    }
  }
}

static inline void conform_streams_end(conform_end *end, const conform_link *link) {
  for (int i = 0; i < CONFORM_LINKS; i++)
    if (end->streams[i] && (!link || end->streams[i]->link == link))
      conform_stream_end(end->streams[i]);
}

static inline int conform_stream_done(const conform_stream *stream) {
  return stream->next == stream->count && !conform_in_flight(stream);
}

/* --- events ----------------------------------------------------------------------------------- */

static inline void conform_on_sent(conform_end *end, uint32_t id, uint64_t token) {
  assert_true(token != 0);
  for (int i = 0; i < CONFORM_LINKS; i++)
    for (int k = 0; end->streams[i] && k < CONFORM_IN_FLIGHT; k++)
      if (end->streams[i]->flights[k].token == token) {
        assert_int_equal(end->streams[i]->link->id, id);
        conform_flight_end(&end->streams[i]->flights[k]);
        return;
      }
}

/* A header that was reported before its frame is that of the next frame. */
static inline void conform_on_head(conform_link *link, const mlfab_io_event *event) {
  uint32_t head_bytes, bulk_bytes;
  assert_non_null(link);
  assert_int_equal(event->head_bytes, MLFAB_HEADER_BYTES);
  assert_int_equal((uintptr_t)event->head % 8, 0);
  assert_int_equal(mlfab_frame_check(event->head, &head_bytes, &bulk_bytes), 0);
  assert_true(event->token <= 1 && event->token == (uint64_t)link->announced);
  link->announced = 1;
  if (!event->token) memcpy(link->header, event->head, sizeof link->header);
}

static inline void conform_on_frame(conform_end *end, conform_link *link,
                                    const mlfab_io_event *event) {
  assert_true(event->head_bytes >= 80);
  uint64_t stream = conform_get((const uint8_t *)event->head + 64);
  if (!link->next) link->stream = stream;
  if (link->announced) assert_memory_equal(event->head, link->header, sizeof link->header);
  link->announced = 0;
  assert_int_equal(stream, link->stream);
  conform_frame_expect(event, stream, link->next++);
  end->frames++;
  if (end->held_count < end->hold)
    end->held[end->held_count++] = *event;
  else
    end->world->table->release(end->self, event);
}

static inline void conform_on_down(conform_end *end, conform_link *link,
                                   const mlfab_io_event *event) {
  const char *text = event->text ? event->text : "";
  assert_true(event->code < 0);
  if (!event->link) {
    end->failures++;
    end->failed_token = event->token;
    end->failed_code = event->code;
    snprintf(end->failed_text, sizeof end->failed_text, "%s", text);
    return;
  }
  assert_non_null(link);
  link->down = 1;
  link->code = event->code;
  snprintf(link->text, sizeof link->text, "%s", text);
  for (int i = 0; i < CONFORM_LINKS; i++) /* all borrowed memory is returned */
    for (int k = 0; end->streams[i] && end->streams[i]->link == link && k < CONFORM_IN_FLIGHT; k++)
      conform_flight_end(&end->streams[i]->flights[k]);
}

static inline void conform_on_event(conform_end *end, const mlfab_io_event *event) {
  conform_link *link = event->link ? conform_link_of(end, event->link) : NULL;
  end->events++;
  assert_true(event->link < 1u << 24);
  if (event->kind != MLFAB_IO_UP && event->link) {
    assert_non_null(link);
    assert_false(link->down); /* no event follows DOWN */
  }
  switch (event->kind) {
    case MLFAB_IO_UP:
      assert_true(event->link != 0 && (!link || link->down));
      assert_true(end->link_count < CONFORM_LINKS);
      link = &end->links[end->link_count++];
      memset(link, 0, sizeof *link);
      link->id = event->link;
      link->token = event->token;
      break;
    case MLFAB_IO_DOWN:
      conform_on_down(end, link, event);
      break;
    case MLFAB_IO_FRAME:
      assert_non_null(link);
      conform_on_frame(end, link, event);
      break;
    case MLFAB_IO_HEAD:
      conform_on_head(link, event);
      break;
    case MLFAB_IO_SENT:
      conform_on_sent(end, event->link, event->token);
      break;
    case MLFAB_IO_WRITABLE:
      link->blocked = 0;
      link->writables++;
      break;
    case MLFAB_IO_REFUSED:
      end->refused++;
      end->refused_code = event->code;
      snprintf(end->refused_text, sizeof end->refused_text, "%s", event->text ? event->text : "");
      break;
    default:
      fail_msg("event of kind %u", event->kind);
  }
}

/* Lets one end work; returns the number of its events. */
static inline int conform_pump_end(conform_end *end) {
  mlfab_io_event event;
  int n = 0;
  if (!end->self) return 0;
  const mlfab_transport *table = end->world->table;
  conform_streams_go(end);
  table->flush(end->self);
  for (; n < 64 && table->poll(end->self, &event) == 1; n++) conform_on_event(end, &event);
  return n;
}

static inline void conform_pump(conform_world *world) {
  int n = 0;
  for (int i = 0; i < CONFORM_ENDS; i++) n += conform_pump_end(&world->ends[i]);
  if (world->transport->step) world->transport->step(world);
  if (!n && !world->transport->step) usleep(50);
}

/* Pumps until the condition holds; fails after two minutes: the machine may be busy. */
#define CONFORM_UNTIL(world, condition)                                                \
  do {                                                                                 \
    uint64_t conform_deadline = conform_now(NULL) + CONFORM_PATIENCE;                  \
    while (!(condition)) {                                                             \
      if (conform_now(NULL) > conform_deadline) fail_msg("waited for %s", #condition); \
      conform_pump(world);                                                             \
    }                                                                                  \
  } while (0)

/* Waits a little, so that events still under way arrive. */
static inline void conform_settle(conform_world *world) {
  for (int i = 0; i < 200; i++) conform_pump(world);
}

/* Connects end a to end b and sends one frame of `stream` each way, because a transport may report UP to
 * the called side only then. The links' streams continue with frame 1. */
static inline void conform_pair(conform_end *a, conform_end *b, uint64_t token, uint64_t stream,
                                conform_link **at_a, conform_link **at_b) {
  int before = b->link_count;
  assert_int_equal(a->world->table->connect(a->self, b->address, token), 0);
  CONFORM_UNTIL(a->world, conform_link_by(a, token, 0));
  *at_a = conform_link_by(a, token, 0);
  conform_stream *there = conform_stream_begin(a, *at_a, stream, 1);
  CONFORM_UNTIL(a->world, b->link_count > before && b->links[b->link_count - 1].next == 1);
  *at_b = &b->links[b->link_count - 1];
  assert_int_equal((*at_b)->token, 0);
  conform_stream *back = conform_stream_begin(b, *at_b, stream, 1);
  CONFORM_UNTIL(a->world,
                (*at_a)->next == 1 && conform_stream_done(there) && conform_stream_done(back));
  conform_stream_end(there);
  conform_stream_end(back);
}

/* Opens ends 0 and 1 and connects them. */
static inline void conform_two(conform_world *world, uint64_t stream, conform_link **at_0,
                               conform_link **at_1) {
  conform_end_open(world, 0);
  conform_end_open(world, 1);
  conform_pair(&world->ends[0], &world->ends[1], 1, stream, at_0, at_1);
}

/* Sends the rest of a stream that conform_pair started, up to frame `count`. */
static inline conform_stream *conform_go_on(conform_end *end, conform_link *link, uint64_t stream,
                                            uint64_t count) {
  conform_stream *s = conform_stream_begin(end, link, stream, count);
  s->next = 1;
  return s;
}

/* --- the checks ------------------------------------------------------------------------------- */

static inline void conform_check_open(conform_world *world) {
  const mlfab_transport *table = world->table;
  assert_int_equal(table->abi, MLFAB_TRANSPORT_ABI);
  assert_true(table->size >= sizeof *table);
  assert_non_null(table->name);
  conform_end_open(world, 0);
  conform_end_open(world, 1);
  for (int i = 0; i < 2; i++) {
    const char *address = world->ends[i].address;
    assert_true(strlen(address) > 0 && strlen(address) < 256);
    assert_null(strchr(address, ' '));
    assert_int_equal(table->reach(world->ends[1 - i].self, address), 1);
  }
  assert_string_not_equal(world->ends[0].address, world->ends[1].address);
  assert_int_equal(table->reach(world->ends[0].self, "nonsense"), 0);
  assert_int_equal(table->reach(world->ends[0].self, ""), 0);
  conform_settle(world);
  assert_int_equal(world->ends[0].events + world->ends[1].events, 0);
}

static inline void conform_check_connect(conform_world *world) {
  conform_link *a, *b;
  conform_end_open(world, 0);
  conform_end_open(world, 1);
  conform_pair(&world->ends[0], &world->ends[1], 77, CONFORM_STREAM(1, CONFORM_TINY), &a, &b);
  assert_true(a->id > 0 && b->id > 0);
  conform_settle(world);
  assert_int_equal(world->ends[0].link_count, 1);
  assert_int_equal(world->ends[1].link_count, 1);
}

/* Streams of one profile in both directions at once. */
static inline void conform_both_ways(conform_world *world, int profile, uint64_t count) {
  conform_link *a, *b;
  uint64_t stream = CONFORM_STREAM(3, profile);
  conform_two(world, stream, &a, &b);
  conform_stream *there = conform_go_on(&world->ends[0], a, stream, count);
  conform_stream *back = conform_go_on(&world->ends[1], b, stream, count);
  CONFORM_UNTIL(world, conform_stream_done(there) && conform_stream_done(back) &&
                           a->next == count && b->next == count);
  conform_settle(world);
  assert_int_equal(a->next, count);
  assert_int_equal(b->next, count);
  assert_false(a->down || b->down);
}

static inline void conform_check_tiny(conform_world *world) {
  conform_both_ways(world, CONFORM_TINY, conform_count(1e6, 2000));
}
static inline void conform_check_small(conform_world *world) {
  conform_both_ways(world, CONFORM_SMALL, conform_count(5e5, 1000));
}
static inline void conform_check_mixed(conform_world *world) {
  conform_both_ways(world, CONFORM_MIXED, conform_count(5e4, 300));
}
static inline void conform_check_chunks(conform_world *world) {
  conform_both_ways(world, CONFORM_CHUNKS, conform_count(1e4, 50));
}
static inline void conform_check_big(conform_world *world) {
  conform_both_ways(world, CONFORM_BIG, conform_count(2e3, 20));
}

/* Sends while the receiver does nothing, until the link refuses; returns the number of frames. */
static inline uint64_t conform_flood(conform_stream *stream) {
  conform_end *end = stream->end;
  uint64_t deadline = conform_now(NULL) + CONFORM_PATIENCE;
  int idle = 0;
  while (idle < 20) {
    uint64_t before = stream->next;
    conform_pump_end(end);
    if (end->world->transport->step) end->world->transport->step(end->world);
    idle = stream->next == before ? idle + 1 : 0;
    if (conform_now(NULL) > deadline || stream->next == stream->count) fail_msg("never refused");
    usleep(200);
  }
  return stream->next;
}

static inline void conform_check_backpressure(conform_world *world) {
  for (int profile = 0; profile < CONFORM_PROFILES; profile++) {
    conform_link *a, *b;
    uint64_t stream = CONFORM_STREAM(5, profile);
    conform_two(world, stream, &a, &b);
    conform_stream *s = conform_go_on(&world->ends[0], a, stream, 10000000);
    uint64_t sent = conform_flood(s);
    s->count = sent + 10; /* once writable, it must accept more */
    CONFORM_UNTIL(world, conform_stream_done(s) && b->next == s->count);
    conform_end_close(&world->ends[0]);
    conform_stream_end(s);
    conform_end_close(&world->ends[1]);
  }
}

static inline void conform_check_detach(conform_world *world) {
  conform_link *a, *b;
  uint64_t stream = CONFORM_STREAM(6, CONFORM_CHUNKS);
  conform_two(world, stream, &a, &b);
  conform_stream *s = conform_go_on(&world->ends[0], a, stream, 100000);
  s->count = conform_flood(s);
  for (int i = 0; i < CONFORM_IN_FLIGHT; i++) {
    if (!s->flights[i].token) continue;
    assert_int_equal(world->table->detach(world->ends[0].self, a->id, s->flights[i].token), 0);
    conform_flight_end(&s->flights[i]);
  }
  assert_int_equal(world->table->detach(world->ends[0].self, a->id, 987654321), 0);
  CONFORM_UNTIL(world, b->next == s->count);
}

static inline void conform_check_disconnect(conform_world *world) {
  conform_link *a, *b;
  uint64_t stream = CONFORM_STREAM(7, CONFORM_SMALL);
  conform_two(world, stream, &a, &b);
  /* Frames on their way to the leaving side must not damage what it sent. */
  conform_stream *other = conform_go_on(&world->ends[1], b, stream, 10);
  conform_pump_end(&world->ends[1]);
  conform_stream *s = conform_go_on(&world->ends[0], a, stream, 10);
  conform_streams_go(&world->ends[0]);
  assert_int_equal(s->next, 10);
  world->table->disconnect(world->ends[0].self, a->id);
  uint64_t events = world->ends[0].events;
  conform_stream_end(s); /* nothing is borrowed any more */
  CONFORM_UNTIL(world, b->down);
  assert_int_equal(b->next, 10);
  assert_true(b->code < 0);
  conform_settle(world);
  assert_int_equal(world->ends[0].events, events);
  conform_stream_end(other);
  conform_frame frame;
  conform_frame_make(stream, 0, &frame);
  assert_int_equal(
      world->table->send(world->ends[0].self, a->id, frame.head, frame.head_bytes, NULL, 0, 0),
      MLFAB_ERR_PEER_CLOSED);
  assert_int_equal(
      world->table->send(world->ends[1].self, b->id, frame.head, frame.head_bytes, NULL, 0, 0),
      MLFAB_ERR_PEER_CLOSED);
  free(frame.head);
  free(frame.bulk);
  world->table->disconnect(world->ends[0].self, a->id); /* a second call does nothing */
}

/* The other end dies: its frames arrive up to some point, then DOWN; borrowing ends. */
static inline void conform_check_death(conform_world *world) {
  conform_link *a, *b;
  uint64_t stream = CONFORM_STREAM(8, CONFORM_MIXED);
  conform_two(world, stream, &a, &b);
  conform_stream *out = conform_go_on(&world->ends[0], a, stream, 1000000);
  conform_stream *dying = conform_go_on(&world->ends[1], b, stream, 200);
  conform_flood(out);
  for (int i = 0; i < 50; i++) conform_pump_end(&world->ends[1]);
  conform_kill(world, 1);
  CONFORM_UNTIL(world, a->down);
  assert_true(a->next <= dying->next);
  assert_int_equal(conform_in_flight(out), 0);
  assert_true(a->code == MLFAB_ERR_PEER_CLOSED || a->code == MLFAB_ERR_PEER_DEAD);
  assert_true(strlen(a->text) > 0);
  conform_stream_end(dying);
  assert_int_equal(conform_stream_send(out), MLFAB_ERR_PEER_CLOSED);
}

/* A sender whose peer has gone receives everything that the peer sent before, though its own sends fail
 * meanwhile. */
static inline void conform_check_last_words(conform_world *world) {
  conform_link *a, *b;
  mlfab_io_event event;
  uint64_t stream = CONFORM_STREAM(28, CONFORM_TINY);
  conform_end *here = &world->ends[0], *leaver = &world->ends[1];
  const mlfab_transport *table = world->table;
  conform_two(world, stream, &a, &b);
  conform_stream *last = conform_go_on(leaver, b, stream, 100);
  for (int i = 0; i < 200; i++) { /* nobody polls meanwhile */
    conform_pump_end(leaver);
    if (i == 100) table->disconnect(leaver->self, b->id);
    if (world->transport->step) world->transport->step(world);
  }
  assert_int_equal(last->next, 100);
  conform_stream_end(last);
  conform_end_close(leaver);
  conform_stream *out = conform_go_on(here, a, stream, 1000000);
  uint64_t until = conform_now(NULL) + CONFORM_PATIENCE;
  int failed = 0;
  while (!a->down) { /* one send between any two events */
    assert_true(conform_now(NULL) < until);
    if (!a->blocked) failed += conform_stream_send(out) == MLFAB_ERR_PEER_CLOSED;
    table->flush(here->self);
    if (table->poll(here->self, &event) == 1) conform_on_event(here, &event);
    if (world->transport->step) world->transport->step(world);
  }
  assert_int_equal(a->next, 100);
  assert_int_equal(conform_in_flight(out), 0);
  if (world->transport->flags & CONFORM_SOCKETS) assert_true(failed > 0);
}

static inline void conform_check_nobody(conform_world *world) {
  char address[256];
  conform_end_open(world, 0);
  conform_end_open(world, 1);
  memcpy(address, world->ends[1].address, sizeof address);
  conform_end_close(&world->ends[1]);
  int status = world->table->connect(world->ends[0].self, address, 42);
  if (status) {
    assert_int_equal(status, MLFAB_ERR_ADDRESS);
    return;
  }
  CONFORM_UNTIL(world, world->ends[0].failures);
  assert_int_equal(world->ends[0].failed_token, 42);
  assert_true(world->ends[0].failed_code < 0);
  assert_non_null(strstr(world->ends[0].failed_text, address));
  conform_settle(world);
  assert_int_equal(world->ends[0].failures, 1);
  assert_int_equal(world->ends[0].link_count, 0);
}

static inline void conform_check_replaced(conform_world *world) {
  char address[256];
  conform_end *end = &world->ends[0];
  conform_end_open(world, 0);
  conform_end_open(world, 1);
  conform_end_open(world, 2);
  memcpy(address, world->ends[2].address, sizeof address);
  conform_end_close(&world->ends[2]);
  (void)world->table->connect(end->self, address, 7);
  assert_int_equal(world->table->connect(end->self, world->ends[1].address, 7), 0);
  assert_int_equal(world->table->connect(end->self, world->ends[1].address, 7), 0);
  CONFORM_UNTIL(world, end->link_count);
  conform_settle(world);
  assert_int_equal(end->link_count, 1);
  assert_int_equal(end->failures, 0);
  conform_link *link = conform_link_by(end, 7, 0);
  assert_non_null(link);
  conform_stream_begin(end, link, CONFORM_STREAM(9, CONFORM_SMALL), 5);
  CONFORM_UNTIL(world, world->ends[1].frames == 5);
}

/* A frame does not change until it is released. */
static inline void conform_check_release(conform_world *world) {
  conform_link *a, *b;
  uint64_t stream = CONFORM_STREAM(10, CONFORM_SMALL);
  conform_end *end = &world->ends[1];
  conform_two(world, stream, &a, &b);
  conform_stream *s = conform_go_on(&world->ends[0], a, stream, 9);
  end->hold = 8;
  CONFORM_UNTIL(world, b->next == 9);
  end->hold = 0;
  for (int i = 0; i < 8; i++) conform_frame_expect(&end->held[i], stream, (uint64_t)i + 1);
  for (int i = 0; i < 8; i++) world->table->release(end->self, &end->held[i]);
  end->held_count = 0;
  s->count = 100;
  CONFORM_UNTIL(world, b->next == 100);
}

static void *conform_waker(void *opaque) {
  conform_end *end = opaque;
  usleep(50000);
  end->world->table->wake(end->self);
  return NULL;
}

static inline double conform_wait_seconds(conform_end *end, uint64_t timeout_ns) {
  uint64_t begin = conform_now(NULL);
  end->world->table->wait(end->self, timeout_ns);
  return (double)(conform_now(NULL) - begin) * 1e-9;
}

/* The wait ends long before its time, or before the test's patience. */
static inline void conform_wait_ends(conform_end *end, uint64_t timeout_ns) {
  assert_true(conform_wait_seconds(end, timeout_ns) < 0.75e-9 * CONFORM_PATIENCE);
}

static inline void conform_check_wait(conform_world *world) {
  const mlfab_transport *table = world->table;
  conform_link *a, *b;
  pthread_t thread;
  conform_end_open(world, 0);
  conform_end_open(world, 1);
  uint64_t stream = CONFORM_STREAM(11, CONFORM_TINY);
  conform_pair(&world->ends[0], &world->ends[1], 1, stream, &a, &b);
  conform_settle(world);
  conform_wait_ends(&world->ends[1], 0);
  conform_wait_ends(&world->ends[1], 1000000);
  table->wake(world->ends[1].self); /* before the wait */
  conform_wait_ends(&world->ends[1], CONFORM_PATIENCE);
  double slept = 0; /* a wake is used up when it has ended one wait */
  for (int i = 0; i < 20; i++) slept += conform_wait_seconds(&world->ends[1], 10000000);
  assert_true(slept > 0.05);
  for (int i = 0; i < 3; i++) { /* during it */
    assert_int_equal(pthread_create(&thread, NULL, conform_waker, &world->ends[1]), 0);
    uint64_t begin = conform_now(NULL);
    while (conform_now(NULL) - begin < 20000000)
      conform_wait_ends(&world->ends[1], CONFORM_PATIENCE);
    pthread_join(thread, NULL);
  }
  conform_go_on(&world->ends[0], a, stream, 100);
  while (b->next < 100) { /* a frame */
    conform_pump_end(&world->ends[0]);
    conform_wait_ends(&world->ends[1], CONFORM_PATIENCE);
    conform_pump_end(&world->ends[1]);
  }
}

static void *conform_sleeper(void *opaque) {
  conform_end *end = opaque;
  for (int i = 0; i < 300; i++) {
    end->world->table->wait(end->self, 100000);
    if (i % 3 == 0) end->world->table->wake(end->self);
    if (end->world->table->fd) end->world->table->fd(end->self);
  }
  return NULL;
}

/* Other threads sleep and wake while this one works; for race detectors. */
static inline void conform_check_threads(conform_world *world) {
  conform_link *a, *b;
  pthread_t threads[2];
  uint64_t stream = CONFORM_STREAM(17, CONFORM_SMALL);
  conform_end_open(world, 0);
  conform_end_open(world, 1);
  for (int i = 0; i < 2; i++)
    assert_int_equal(pthread_create(&threads[i], NULL, conform_sleeper, &world->ends[i]), 0);
  conform_pair(&world->ends[0], &world->ends[1], 1, stream, &a, &b);
  conform_stream *there = conform_go_on(&world->ends[0], a, stream, 1000);
  conform_stream *back = conform_go_on(&world->ends[1], b, stream, 1000);
  CONFORM_UNTIL(world, conform_stream_done(there) && conform_stream_done(back) && a->next == 1000 &&
                           b->next == 1000);
  for (int i = 0; i < 2; i++) pthread_join(threads[i], NULL);
}

static inline int conform_readable(int fd, int timeout_ms) {
  struct pollfd entry = {.fd = fd, .events = POLLIN};
  return poll(&entry, 1, timeout_ms) > 0;
}

static inline void conform_check_fd(conform_world *world) {
  const mlfab_transport *table = world->table;
  conform_link *a, *b;
  conform_end *end = &world->ends[1];
  uint64_t stream = CONFORM_STREAM(12, CONFORM_TINY);
  conform_end_open(world, 0);
  conform_end_open(world, 1);
  int fd = table->fd(end->self);
  if (fd < 0) return; /* it has none, and says so */
  conform_pair(&world->ends[0], end, 1, stream, &a, &b);
  for (uint64_t count = 2; count < 50; count++) {
    conform_pump_end(end);
    conform_pump_end(end);
    conform_stream *s = conform_stream_begin(&world->ends[0], a, stream, count);
    s->next = count - 1;
    conform_pump_end(&world->ends[0]);
    while (b->next < count) {
      if (!table->arm(end->self, 1))
        assert_true(conform_readable(fd, (int)(CONFORM_PATIENCE / 1000000)));
      table->arm(end->self, 0);
      conform_pump_end(end);
    }
    conform_stream_end(s);
  }
  conform_pump_end(end);
  assert_int_equal(table->arm(end->self, 1), 0);
  assert_false(conform_readable(fd, 20)); /* no event, so sleeping is allowed */
  table->wake(end->self);
  assert_true(conform_readable(fd, (int)(CONFORM_PATIENCE / 1000000)));
  table->arm(end->self, 0);
  assert_false(conform_readable(fd, 20));
}

static inline void conform_check_many(conform_world *world) {
  enum { MANY = CONFORM_ENDS - 1 };
  static conform_stream *streams[2 * MANY];
  uint64_t stream = CONFORM_STREAM(13, CONFORM_MIXED), count = conform_count(1000, 10);
  conform_end *hub = &world->ends[0];
  conform_end_open(world, 0);
  for (int i = 1; i <= MANY; i++) {
    conform_link *a, *b;
    conform_end_open(world, i);
    conform_pair(&world->ends[i], hub, (uint64_t)i, stream, &a, &b);
    streams[i - 1] = conform_go_on(&world->ends[i], a, stream, count);
    streams[MANY + i - 1] = conform_go_on(hub, b, stream, count);
  }
  for (int i = 0; i < 2 * MANY; i++) CONFORM_UNTIL(world, conform_stream_done(streams[i]));
  for (int i = 1; i <= MANY; i++) {
    CONFORM_UNTIL(world, world->ends[i].links[0].next == count);
    CONFORM_UNTIL(world, hub->links[i - 1].next == count);
  }
}

/* A link that is always busy does not starve others. */
static inline void conform_check_fair(conform_world *world) {
  conform_link *a[3], *b[3];
  uint64_t stream = CONFORM_STREAM(18, CONFORM_CHUNKS), few = CONFORM_STREAM(18, CONFORM_TINY);
  conform_end *hub = &world->ends[3];
  for (int i = 0; i < 4; i++) conform_end_open(world, i);
  for (int i = 0; i < 3; i++)
    conform_pair(&world->ends[i], hub, 1, i < 2 ? stream : few, &a[i], &b[i]);
  conform_go_on(&world->ends[0], a[0], stream, 1000000);
  conform_go_on(&world->ends[1], a[1], stream, 1000000);
  CONFORM_UNTIL(world, b[0]->next > 20 && b[1]->next > 20);
  conform_go_on(&world->ends[2], a[2], few, 20);
  uint64_t before = b[0]->next + b[1]->next;
  CONFORM_UNTIL(world, b[2]->next == 20);
  assert_true(b[0]->next + b[1]->next < before + 2000);
  CONFORM_UNTIL(world, b[0]->next > 40 && b[1]->next > 40);
}

/* Links are opened, closed and killed at random while all of them are busy. */
static inline void conform_check_storm(conform_world *world) {
  uint64_t rounds = conform_count(1200, 4), r = 12345;
  for (uint64_t round = 0; round < rounds; round++) {
    for (int i = 0; i < 4; i++)
      if (!world->ends[i].self) conform_end_open(world, i);
    for (uint64_t k = 1; k <= 8; k++) {
      conform_link *at_a, *at_b;
      r = mix(r);
      conform_end *a = &world->ends[r % 4], *b = &world->ends[(r % 4 + 1 + r / 4 % 3) % 4];
      if (!a->self || !b->self) continue;
      uint64_t stream = CONFORM_STREAM(100 + k, CONFORM_MIXED);
      conform_pair(a, b, k, stream, &at_a, &at_b);
      conform_go_on(a, at_a, stream, 2 + r / 16 % 40);
      conform_go_on(b, at_b, stream, 2 + r / 1024 % 40);
      for (uint64_t n = r >> 20 & 15; n > 0; n--) conform_pump(world);
      if (at_a->down || at_b->down) continue;
      if ((r >> 30 & 3) == 0) {
        world->table->disconnect(a->self, at_a->id);
        conform_streams_end(a, at_a); /* all of it belongs to the caller again */
      } else if ((r >> 30 & 7) == 1) {
        conform_kill(world, (int)(b - world->ends));
        conform_streams_end(b, NULL);
      }
    }
    for (int i = 0; i < 4; i++)
      for (int k = 0; world->ends[i].self && k < CONFORM_LINKS; k++)
        CONFORM_UNTIL(world, !world->ends[i].streams[k] || world->ends[i].streams[k]->link->down ||
                                 conform_stream_done(world->ends[i].streams[k]));
    for (int i = 0; i < 4; i++) {
      conform_end_close(&world->ends[i]);
      conform_streams_end(&world->ends[i], NULL);
    }
  }
}

/* One frame at a time, so that every round needs the same memory. */
static inline void conform_lock_step(conform_world *world, conform_stream *s, conform_link *to,
                                     uint64_t count) {
  while (s->count < count) {
    s->count++;
    CONFORM_UNTIL(world, to->next == s->count && conform_stream_done(s));
  }
}

static inline void conform_check_allocations(conform_world *world) {
  conform_link *a, *b;
  uint64_t stream = CONFORM_STREAM(14, CONFORM_MIXED);
  conform_two(world, stream, &a, &b);
  conform_stream *there = conform_go_on(&world->ends[0], a, stream, 1);
  conform_stream *back = conform_go_on(&world->ends[1], b, stream, 1);
  /* The peak depends on timing, so it may grow during the first rounds. */
  uint64_t before = 0, now = 1;
  for (uint64_t round = 1; round <= 10 && before != now; round++) {
    before = world->ends[0].allocations + world->ends[1].allocations;
    conform_lock_step(world, there, b, round * 200);
    conform_lock_step(world, back, a, round * 200);
    now = world->ends[0].allocations + world->ends[1].allocations;
  }
  assert_int_equal(now, before);
}

/* Takes one measurement of an end and adds it to `sum`. */
static inline void conform_measure(conform_end *end, mlfab_measure *sum) {
  mlfab_measure m = {.elapsed_ns = 1};
  uint64_t allocations = end->allocations;
  int status = end->world->table->measure(end->self, conform_now(NULL), &m);
  if (end->measured)
    assert_int_equal(end->allocations, allocations); /* measuring begins with the first call */
  end->measured = 1;
  assert_true(status == 0 || status == 1);
  if (!status) return;
  assert_true(m.elapsed_ns > 0);
  assert_true(m.limited_in <= 1 && m.limited_out <= 1);
  assert_true(m.delivery_in >= 0 && m.delivery_in - m.delivery_in == 0);
  assert_true(m.delivery_out >= 0 && m.delivery_out - m.delivery_out == 0);
  assert_true(m.nominal >= 0 && m.nominal - m.nominal == 0);
  sum->elapsed_ns += m.elapsed_ns;
  sum->bytes_in += m.bytes_in;
  sum->bytes_out += m.bytes_out;
}

/* Measurements count every byte since the first of them. */
static inline void conform_check_measure(conform_world *world) {
  conform_end *end = &world->ends[0], *peer = &world->ends[1];
  conform_link *a, *b;
  mlfab_measure mine = {0}, theirs = {0};
  uint64_t stream = CONFORM_STREAM(17, CONFORM_CHUNKS), bytes = 0;
  if (!world->table->measure) {
    print_message("%s: measures nothing\n", world->transport->name);
    return; /* no network to measure, and no function for it */
  }
  conform_two(world, stream, &a, &b);
  for (int i = 0; i < 3; i++) conform_pump(world);
  conform_measure(end, &mine);
  conform_measure(peer, &theirs);
  assert_int_equal(mine.elapsed_ns, 0); /* the first one has no predecessor */
  assert_int_equal(theirs.elapsed_ns, 0);
  conform_stream *there = conform_go_on(end, a, stream, 1);
  for (uint64_t i = 1; i < 40; i++) {
    conform_frame frame;
    conform_frame_make(stream, i, &frame);
    bytes += frame.head_bytes + frame.bulk_bytes;
    free(frame.head);
    free(frame.bulk);
    conform_lock_step(world, there, b, i + 1);
    if (i % 3 == 0) conform_measure(end, &mine);
  }
  for (int i = 0; i < 3; i++) conform_pump(world);
  conform_measure(end, &mine);
  conform_measure(peer, &theirs);
  assert_true(mine.bytes_out >= bytes && mine.elapsed_ns > 0);
  assert_true(theirs.bytes_in >= bytes && theirs.elapsed_ns > 0);
}

/* Links open and close; numbers are not reused soon, memory does not grow. */
static inline void conform_check_reconnect(conform_world *world) {
  conform_end *end = &world->ends[0], *peer = &world->ends[1];
  enum { TIMES = 160 };
  uint32_t seen[TIMES];
  int64_t bytes = 0;
  conform_end_open(world, 0);
  conform_end_open(world, 1);
  for (uint64_t i = 0; i < TIMES; i++) {
    conform_link *a, *b;
    conform_pair(end, peer, i + 1, CONFORM_STREAM(20 + i, CONFORM_TINY), &a, &b);
    seen[i] = a->id;
    for (uint64_t k = i; k-- > 0 && k + 30 > i;) assert_int_not_equal(seen[k], a->id);
    if (i % 2) {
      world->table->disconnect(end->self, a->id);
      CONFORM_UNTIL(world, b->down);
    } else {
      world->table->disconnect(peer->self, b->id);
      CONFORM_UNTIL(world, a->down);
    }
    for (int k = 0; k < 3; k++) conform_pump(world);
    end->link_count = peer->link_count = 0;
    if (i == 100) bytes = end->bytes + peer->bytes;
  }
  assert_true(end->bytes + peer->bytes <= bytes + 65536);
}

/* --- strangers: peers that do not speak the protocol ---------------------------------------------- */

static inline int conform_stranger(conform_world *world, conform_end *end) {
  int fd = world->transport->stranger(end->address);
  assert_true(fd >= 0);
  return fd;
}

static inline void conform_write(int fd, const void *data, size_t bytes) {
  assert_int_equal(send(fd, data, bytes, MSG_NOSIGNAL), bytes);
}

static inline void conform_check_strangers(conform_world *world) {
  static const char http[] =
      "GET / HTTP/1.1\r\nHost: localhost\r\nUser-Agent: curl/8.0 (just looking)\r\n\r\n";
  conform_end *end = &world->ends[0];
  conform_end_open(world, 0);
  int fd = conform_stranger(world, end);
  conform_write(fd, http, sizeof http - 1);
  CONFORM_UNTIL(world, end->refused == 1);
  assert_int_equal(end->refused_code, MLFAB_ERR_FRAME);
  assert_true(strlen(end->refused_text) > 0);
  close(fd);
  fd = conform_stranger(world, end);
  close(fd); /* a port scan */
  CONFORM_UNTIL(world, end->refused == 2);
  for (uint32_t i = 0; i < 50; i++) {
    uint8_t noise[300];
    conform_fill(noise, sizeof noise, mix(i));
    fd = conform_stranger(world, end);
    conform_write(fd, noise, sizeof noise);
    CONFORM_UNTIL(world, end->refused == 3 + i);
    close(fd);
  }
  assert_int_equal(end->link_count, 0);
}

/* Flips every bit of a header, and some of the rest: never a link, never a frame. */
static inline void conform_check_bits(conform_world *world) {
  conform_end *end = &world->ends[0];
  conform_frame frame;
  conform_end_open(world, 0);
  conform_frame_make(CONFORM_STREAM(15, CONFORM_SMALL), 0, &frame);
  conform_seal(frame.head, frame.head_bytes - 64, frame.bulk, frame.bulk_bytes, 1);
  uint32_t all = frame.head_bytes + frame.bulk_bytes, refused = 0;
  uint8_t *bytes = malloc(all);
  assert_non_null(bytes);
  for (uint32_t bit = 0; bit < all * 8; bit += bit < 512 ? 1 : 97) {
    memcpy(bytes, frame.head, frame.head_bytes);
    if (frame.bulk_bytes > 0) memcpy(bytes + frame.head_bytes, frame.bulk, frame.bulk_bytes);
    bytes[bit / 8] ^= (uint8_t)(1 << bit % 8);
    int fd = conform_stranger(world, end);
    conform_write(fd, bytes, all);
    refused++;
    CONFORM_UNTIL(world, end->refused == refused);
    int code = end->refused_code;
    assert_true(code == MLFAB_ERR_FRAME || code == MLFAB_ERR_CRC || code == MLFAB_ERR_LIMIT ||
                code == MLFAB_ERR_PROTOCOL_OLDER || code == MLFAB_ERR_PROTOCOL_NEWER);
    close(fd);
  }
  free(bytes);
  free(frame.head);
  free(frame.bulk);
  assert_int_equal(end->link_count, 0);
}

/* A link that was good so far: the frames before the bad one arrive, then DOWN with its code. */
static inline void conform_check_spoilt(conform_world *world) {
  conform_end *end = &world->ends[0];
  uint64_t stream = CONFORM_STREAM(16, CONFORM_SMALL);
  conform_end_open(world, 0);
  for (int i = 0; i < 20; i++) {
    int fd = conform_stranger(world, end);
    conform_frame frame;
    for (uint64_t k = 0; k < 4; k++) {
      conform_frame_make(stream, k, &frame);
      if (k == 3) frame.head[i % 2 ? 20 : 70] ^= 1;
      for (uint32_t at = 0; at < frame.head_bytes; at += 50) /* in small pieces */
        conform_write(fd, frame.head + at, frame.head_bytes - at < 50 ? frame.head_bytes - at : 50);
      conform_write(fd, frame.bulk, frame.bulk_bytes);
      free(frame.head);
      free(frame.bulk);
    }
    CONFORM_UNTIL(world, end->link_count == i + 1 && end->links[i].down);
    assert_int_equal(end->links[i].next, 3);
    assert_int_equal(end->links[i].code, MLFAB_ERR_CRC);
    assert_true(strlen(end->links[i].text) > 0);
    close(fd);
  }
}

/* --- the list --------------------------------------------------------------------------------- */

static const struct {
  const char *name;
  void (*run)(conform_world *world);
  uint32_t needs; /* flags of the transport */
} conform_checks[] = {
    {"opens and publishes an address", conform_check_open, 0},
    {"a connection is UP on both sides", conform_check_connect, 0},
    {"tiny frames whole, once, in order, both ways", conform_check_tiny, 0},
    {"small bulks", conform_check_small, 0},
    {"all sizes mixed", conform_check_mixed, 0},
    {"chunks of 256 KiB", conform_check_chunks, 0},
    {"chunks of 1 MiB", conform_check_big, 0},
    {"back-pressure loses nothing", conform_check_backpressure, 0},
    {"detached bulks may be overwritten", conform_check_detach, 0},
    {"disconnect delivers what was sent", conform_check_disconnect, 0},
    {"a death is DOWN after what was delivered", conform_check_death, 0},
    {"last words come though sends fail", conform_check_last_words, 0},
    {"connecting to nobody is DOWN, naming it", conform_check_nobody, 0},
    {"a second connect replaces the first", conform_check_replaced, 0},
    {"frames are borrowed until release", conform_check_release, 0},
    {"wait ends at a wake and at an event", conform_check_wait, CONFORM_WAITS},
    {"the descriptor tells when there is something", conform_check_fd, CONFORM_WAITS},
    {"other threads may wait and wake", conform_check_threads, CONFORM_WAITS},
    {"a busy link starves no other", conform_check_fair, 0},
    {"links made, left and killed at random", conform_check_storm, 0},
    {"fifty links at once", conform_check_many, 0},
    {"steady state allocates nothing", conform_check_allocations, 0},
    {"measures tell of every byte", conform_check_measure, 0},
    {"links come and go", conform_check_reconnect, 0},
    {"strangers are refused", conform_check_strangers, CONFORM_SOCKETS},
    {"frames with a wrong bit are refused", conform_check_bits, CONFORM_SOCKETS},
    {"a link that goes bad is DOWN", conform_check_spoilt, CONFORM_SOCKETS},
};
enum { CONFORM_CHECKS = sizeof conform_checks / sizeof conform_checks[0] };

typedef struct conform_case {
  const conform_transport *transport;
  void (*run)(conform_world *world);
  conform_world *world;
  char name[160];
} conform_case;

static void conform_case_run(void **state) {
  conform_case *c = *state;
  if (!c->transport->table) {
    print_message("%s: %s\n", c->transport->name, c->transport->missing);
    skip();
  }
  conform_share = c->transport->flags & CONFORM_SAME ? 0.3 : 1.0;
  static int under_way; /* a check that fails does not end it */
  if (under_way && getenv("CONFORM_FIRST")) skip();
  under_way = 1;
  c->run(c->world);
  under_way = 0;
}

static int conform_case_begin(void **state) {
  conform_case *c = *state;
  c->world = calloc(1, sizeof *c->world);
  if (!c->world) return -1;
  c->world->transport = c->transport;
  c->world->table = c->transport->table;
  if (c->world->table && c->transport->begin) c->transport->begin(c->world);
  return 0;
}

static int conform_case_end(void **state) {
  conform_case *c = *state;
  for (int i = 0; i < CONFORM_ENDS; i++) {
    conform_end *end = &c->world->ends[i];
    conform_end_close(end);
    conform_streams_end(end, NULL);
  }
  if (c->world->table && c->transport->finish) c->transport->finish(c->world);
  free(c->world);
  return 0;
}

/* The checks of one transport in a process of its own: what it prints is TAP. */
typedef struct conform_child {
  pid_t pid;
  FILE *output;
  char *text; /* of all its cases, when it has ended */
} conform_child;

/* A case as the first process sees it: case `number` (from 1) of a child. */
typedef struct conform_told {
  conform_child *child;
  size_t number;
} conform_told;

/* The end of the child, and all that it has printed. */
static inline void conform_child_end(conform_child *child) {
  int status = 0;
  if (child->text) return;
  assert_int_equal(waitpid(child->pid, &status, 0), child->pid);
  assert_int_equal(fseek(child->output, 0, SEEK_END), 0);
  const long bytes = ftell(child->output);
  child->text = calloc(1, (size_t)bytes + 1);
  assert_true(bytes >= 0 && child->text);
  rewind(child->output);
  assert_int_equal(fread(child->text, 1, (size_t)bytes, child->output), bytes);
  fclose(child->output);
  if (WIFSIGNALED(status)) print_error("the process ended by signal %d\n", WTERMSIG(status));
}

/* The case's line, and the comments that explain it. */
static void conform_told_run(void **state) {
  const conform_told *told = *state;
  char ok[24], failed[24];
  conform_child_end(told->child);
  snprintf(ok, sizeof ok, "ok %u ", (unsigned)told->number);
  snprintf(failed, sizeof failed, "not ok %u ", (unsigned)told->number);
  for (char *line = told->child->text, *end; line && *line; line = end ? end + 1 : NULL) {
    end = strchr(line, '\n');
    const int length = (int)(end ? end - line : (long)strlen(line));
    if (!strncmp(line, failed, strlen(failed))) {
      const char *next = strstr(line, "\nok "), *other = strstr(line, "\nnot ok ");
      if (!next || (other && other < next)) next = other;
      fail_msg("%.*s", next ? (int)(next - line) : (int)strlen(line), line);
    }
    if (strncmp(line, ok, strlen(ok)) != 0) continue;
    for (int i = 0; i + 6 < length; i++)
      if (!strncmp(line + i, "# SKIP", 6)) skip();
    return;
  }
  fail_msg("its process has not come to it:\n%s", told->child->text);
}

static inline void conform_child_begin(conform_child *child, const struct CMUnitTest *tests,
                                       size_t n) {
  child->output = tmpfile();
  if (child->output) fflush(NULL);
  child->pid = child->output ? fork() : -1;
  if (child->pid < 0) {
    perror("conform");
    exit(1);
  }
  if (child->pid > 0) return;
  setenv("CMOCKA_MESSAGE_OUTPUT", "TAP", 1);
  dup2(fileno(child->output), 1);
  dup2(fileno(child->output), 2);
  int failed = _cmocka_run_group_tests("conform", tests, n, NULL, NULL);
  fflush(NULL);
  exit(failed != 0);
}

/* Runs every applicable check on each transport of the list; returns the exit status for main. */
static inline int conform_run(const conform_transport *transports, size_t count) {
  size_t n = 0, first = 0;
  conform_case *cases = calloc(count * CONFORM_CHECKS, sizeof *cases);
  struct CMUnitTest *tests = calloc(count * CONFORM_CHECKS, sizeof *tests);
  struct CMUnitTest *heard = calloc(count * CONFORM_CHECKS, sizeof *heard);
  conform_told *told = calloc(count * CONFORM_CHECKS, sizeof *told);
  conform_child *children = calloc(count, sizeof *children);
  int apart = count > 1;
  if (!cases || !tests || !heard || !told || !children) return 1;
  for (size_t i = 0; i < count; i++) apart &= !(transports[i].flags & CONFORM_ALONE);
  for (size_t i = 0; i < count; i++, first = n) {
    const conform_transport *transport = &transports[i];
    for (size_t check = 0; check < CONFORM_CHECKS; check++) {
      if (conform_checks[check].needs & ~transport->flags) continue;
      conform_case *c = &cases[n];
      c->transport = transport;
      c->run = conform_checks[check].run;
      snprintf(c->name, sizeof c->name, "%s: %s", transport->name, conform_checks[check].name);
      tests[n] =
          (struct CMUnitTest){c->name, conform_case_run, conform_case_begin, conform_case_end, c};
      told[n] = (conform_told){&children[i], n - first + 1};
      heard[n] = (struct CMUnitTest){c->name, conform_told_run, NULL, NULL, &told[n]};
      n++;
    }
    if (apart) conform_child_begin(&children[i], tests + first, n - first);
  }
  int failed = _cmocka_run_group_tests("conform", apart ? heard : tests, n, NULL, NULL);
  for (size_t i = 0; i < count; i++) free(children[i].text);
  free(children);
  free(told);
  free(heard);
  free(cases);
  free(tests);
  return failed;
}

#endif
