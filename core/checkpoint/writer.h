/* writer.h - a server writes its shard to a file of a checkpoint.
 *
 * On an order, the server pins the state of one moment (moment.h), and then writes it record by record while training
 * continues. A slice is given back when its bytes are written.
 *
 *    IDLE --order--> PINS --no update is being applied--> WRITES --END is durable--> IDLE, answered
 *                      |                                   |
 *                      +--slices move, model is freed------+--error--> ABORTS --the file is removed--> IDLE, answered
 *
 * Invariants. (1) A file has one moment. (2) One file operation runs at a time; the memory that it reads does not
 * change until it has copied it. (3) An order is answered exactly once, with its number and set; the last answer is
 * kept, because a link may lose it. */
#ifndef MLFAB__WRITER_H
#define MLFAB__WRITER_H

#include "../node/files.h"
#include "moment.h"
#include "record.h"

struct mlfab__server;

enum mlfab__writer_phase {
  MLFAB__WRITER_IDLE,
  MLFAB__WRITER_PINS,
  MLFAB__WRITER_WRITES,
  MLFAB__WRITER_ABORTS
};

enum { MLFAB__WRITER_HEADS = 65536 };

typedef struct mlfab__writer {
  mlfab__env *env;
  struct mlfab__server *server;
  mlfab__filer *filer;
  void *self;
  void (*done)(void *self, const mlfab__checkpoint_shard *answer);
  enum mlfab__writer_phase phase;
  mlfab__checkpoint_order order;
  mlfab__checkpoint_shard answer; /* answer to this order; while IDLE, to the last one */
  mlfab__moment moment;
  int over; /* the last operation contains END */
  char path[MLFAB__RECORD_PATH];
  uint8_t
      *heads; /* records without their bulk: MLFAB__WRITER_HEADS bytes, from the first order on */
} mlfab__writer;

MLFAB__INTERNAL void mlfab__writer_init(
    mlfab__writer *writer, mlfab__env *env, struct mlfab__server *server, mlfab__filer *filer,
    void *self, void (*done)(void *self, const mlfab__checkpoint_shard *answer));
MLFAB__INTERNAL void mlfab__writer_free(mlfab__writer *writer);
/* Takes an order; a repeated order gets its answer again. A different order meanwhile gets AGAIN. */
MLFAB__INTERNAL void mlfab__writer_order(mlfab__writer *writer,
                                         const mlfab__checkpoint_order *order);
/* Called when no update is being applied. */
MLFAB__INTERNAL void mlfab__writer_due(mlfab__writer *writer);
/* Ends it: gives back all blocks and states at once. */
MLFAB__INTERNAL void mlfab__writer_stop(mlfab__writer *writer, int code, const char *text);
/* Takes the end of its file operation. */
MLFAB__INTERNAL void mlfab__writer_event(mlfab__writer *writer, const mlfab_io_event *event);

#endif
