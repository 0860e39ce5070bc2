/* mirror.c - keeps the other copy of server 0's other jobs informed, and holds back frames meanwhile. See mirror.h. */
#include "mirror.h"

enum { MIRROR_LEAST_ITEMS = 64 };

static void mirror_post(void *self, uint32_t peer, uint8_t type, const void *meta, uint32_t bytes);

/* --- ports: a frame of another type goes straight on --- */

static void mirror_ready(void *self, uint32_t peer) {
  const mlfab__mirror_part *part = self;
  part->port.ready(part->port.self, peer);
}

static void mirror_drop(void *self, uint32_t peer, int code, const char *text) {
  const mlfab__mirror_part *part = self;
  part->port.drop(part->port.self, peer, code, text);
}

static void mirror_detach(void *self, uint32_t peer, uint64_t token) {
  const mlfab__mirror_part *part = self;
  part->port.detach(part->port.self, peer, token);
}

static void mirror_event(void *self, uint32_t kind, int32_t rank, int is_server,
                         uint32_t incarnation, int code, const char *text) {
  const mlfab__mirror_part *part = self;
  part->port.event(part->port.self, kind, rank, is_server, incarnation, code, text);
}

/* --- records --- */

/* Keeps a copy of the bytes. Returns 0, or MEMORY: then it keeps nothing. */
static int mirror_keep(mlfab__env *env, uint8_t **bytes_p, uint32_t *n_p, const uint8_t *bytes,
                       uint32_t n) {
  if (*n_p != n || !*bytes_p) {
    mlfab__free(env, *bytes_p, mlfab__max(*n_p, 1));
    *bytes_p = mlfab__alloc(env, mlfab__max(n, 1));
    *n_p = *bytes_p ? n : 0;
    if (!*bytes_p) return MLFAB_ERR_MEMORY;
  }
  memcpy(*bytes_p, bytes, n);
  return 0;
}

static void mirror_lose(mlfab__env *env, uint8_t **bytes_p, uint32_t *n_p) {
  mlfab__free(env, *bytes_p, mlfab__max(*n_p, 1));
  *bytes_p = NULL;
  *n_p = 0;
}

/* Returns the part that a record belongs to. */
static mlfab__mirror_part *mirror_part_of(mlfab__mirror *mirror, uint32_t record) {
  uint32_t p = mirror->nparts - 1;
  while (mirror->parts[p].first > record) p--;
  return &mirror->parts[p];
}

static uint32_t mirror_encode(mlfab__mirror *mirror, uint32_t record, uint8_t *bytes) {
  const mlfab__mirror_part *part = mirror_part_of(mirror, record);
  uint32_t n = part->mirrored.encode(part->mirrored.self, record - part->first, bytes);
  assert(n <= MLFAB__MIRRORED_BYTES);
  return n;
}

static void mirror_untouch(mlfab__touch *touch) {
  for (uint32_t i = 0; i < touch->n; i++) touch->marked[touch->list[i]] = 0;
  touch->n = 0;
  touch->all = 0;
}

MLFAB__INTERNAL int mlfab__mirror_init(mlfab__mirror *mirror, mlfab__env *env,
                                       const mlfab__mirrored *parts, uint32_t nparts,
                                       const mlfab__port *out, uint32_t peer) {
  memset(mirror, 0, sizeof *mirror);
  mirror->env = env;
  mirror->out = *out;
  mirror->peer = peer;
  for (uint32_t p = 0; p < nparts; p++) {
    mlfab__mirror_part *part = &mirror->parts[mirror->nparts++];
    uint32_t n = parts[p].records;
    *part = (mlfab__mirror_part){.mirror = mirror, .mirrored = parts[p], .first = mirror->nrecords};
    part->touch.marked = mlfab__alloc(env, n);
    part->touch.list = mlfab__alloc_array(env, n, sizeof *part->touch.list);
    if (!part->touch.marked || !part->touch.list) return MLFAB_ERR_MEMORY;
    mirror->nrecords += n;
  }
  mirror->records = mlfab__alloc_array(env, mirror->nrecords, sizeof *mirror->records);
  mirror->list = mlfab__alloc_array(env, mirror->nrecords, sizeof *mirror->list);
  mirror->scratch = mlfab__alloc(env, MLFAB__MIRRORED_BYTES);
  if (!mirror->records || !mirror->list || !mirror->scratch) return MLFAB_ERR_MEMORY;
  for (uint32_t p = 0; p < nparts; p++) {
    mlfab__mirror_part *part = &mirror->parts[p];
    *part->mirrored.touch = &part->touch;
    if (!part->mirrored.port) continue;
    part->port = *part->mirrored.port;
    *part->mirrored.port = (mlfab__port){part,          mirror_post,  mirror_ready, mirror_drop,
                                         mirror_detach, mirror_event, NULL,         NULL};
  }
  return 0;
}

/* --- what waits --- */

static void mirror_unuse(mlfab__mirror *mirror, mlfab__mirror_item *item) {
  mlfab__mirror_words *words = item->words;
  item->words = NULL;
  if (!words || --words->uses > 0) return;
  uint64_t bytes = sizeof *words + words->bytes;
  mirror->bytes -= bytes;
  mlfab__free(mirror->env, words, bytes);
}

static void mirror_forget_all(mlfab__mirror *mirror) {
  for (uint32_t i = mirror->begin; i < mirror->end; i++) mirror_unuse(mirror, &mirror->items[i]);
  mirror->begin = mirror->end = mirror->judged = 0;
}

MLFAB__INTERNAL void mlfab__mirror_forget(mlfab__mirror *mirror, uint32_t worker) {
  for (uint32_t i = mirror->begin; i < mirror->end; i++) {
    mlfab__mirror_item *item = &mirror->items[i];
    if (item->peer == worker && mirror->parts[item->part].mirrored.workers)
      mirror_unuse(mirror, item);
  }
}

/* May the other copy take over, or be about to? */
static int mirror_holds(const mlfab__mirror *mirror) {
  return mirror->facts.named || mirror->follows;
}

/* Returns the words of a frame: those of the last waiting frame if they are equal. NULL: no memory. */
static mlfab__mirror_words *mirror_words(mlfab__mirror *mirror, uint8_t type, const void *meta,
                                         uint32_t bytes) {
  const mlfab__mirror_item *last =
      mirror->end > mirror->begin ? &mirror->items[mirror->end - 1] : NULL;
  if (last && last->words && last->type == type && last->words->bytes == bytes &&
      (bytes == 0 || !memcmp(last->words + 1, meta, bytes)))
    return last->words;
  mlfab__mirror_words *words = mlfab__alloc(mirror->env, sizeof *words + bytes);
  if (!words) return NULL;
  words->bytes = bytes;
  if (bytes > 0) memcpy(words + 1, meta, bytes);
  mirror->bytes += sizeof *words + bytes;
  return words;
}

/* Makes room for one more item: returns 1, or 0. */
static int mirror_make_room(mlfab__mirror *mirror) {
  uint32_t n = mirror->end - mirror->begin;
  if (mirror->bytes + n * sizeof *mirror->items >= MLFAB__MIRROR_ROOM) {
    mirror->behind = 1;
    return 0;
  }
  if (mirror->end < mirror->room) return 1;
  if (mirror->begin >= MIRROR_LEAST_ITEMS && mirror->begin >= n) {
    memmove(mirror->items, mirror->items + mirror->begin, n * sizeof *mirror->items);
    mirror->judged -= mirror->begin;
    mirror->begin = 0;
    mirror->end = n;
    return 1;
  }
  mlfab__mirror_item *items = mlfab__grow(mirror->env, mirror->items, &mirror->room,
                                          (uint64_t)mirror->end + 1, sizeof *items);
  if (!items) return 0;
  mirror->items = items;
  return 1;
}

/* Called when a part sends a frame to somebody. */
static void mirror_post(void *self, uint32_t peer, uint8_t type, const void *meta, uint32_t bytes) {
  mlfab__mirror_part *part = self;
  mlfab__mirror *mirror = part->mirror;
  if (!mirror->serves) return;
  int waits = mirror->stream || mirror->begin < mirror->end || mirror_holds(mirror) ||
              !mirror->facts.leased;
  if (!waits) {
    part->port.post(part->port.self, peer, type, meta, bytes);
    return;
  }
  mlfab__mirror_words *words =
      mirror_make_room(mirror) ? mirror_words(mirror, type, meta, bytes) : NULL;
  if (!words) {
    part->port.drop(part->port.self, peer, MLFAB_ERR_AGAIN,
                    "there is no more room for frames that wait for the other copy");
    return;
  }
  words->uses++;
  mirror->items[mirror->end++] = (mlfab__mirror_item){
      .words = words, .part = (uint32_t)(part - mirror->parts), .peer = peer, .type = type};
}

/* Determines the mark that each frame posted since the last look needs. */
static void mirror_judge(mlfab__mirror *mirror) {
  int changed = mirror->first == 0 || mirror->nlist > 0 || mirror->unmarked;
  for (; mirror->judged < mirror->end; mirror->judged++)
    mirror->items[mirror->judged].mark = mirror->number + (uint64_t)changed;
}

/* Posts the frames that need not wait any more. */
static void mirror_release(mlfab__mirror *mirror) {
  int holds = mirror_holds(mirror);
  while (mirror->begin < mirror->judged && mirror->facts.leased) {
    mlfab__mirror_item *item = &mirror->items[mirror->begin];
    if (holds && item->mark > mirror->has) break;
    mirror->told = mlfab__max(mirror->told, item->mark);
    const mlfab__port *port = &mirror->parts[item->part].port;
    if (item->words)
      port->post(port->self, item->peer, item->type, item->words + 1, item->words->bytes);
    mirror_unuse(mirror, item);
    mirror->begin++;
  }
  if (mirror->begin < mirror->end) return;
  mirror->begin = mirror->end = mirror->judged = 0;
  mirror->behind = 0;
}

/* --- sender --- */

static void mirror_due(mlfab__mirror *mirror, uint32_t record) {
  if (mirror->records[record].due) return;
  mirror->records[record].due = 1;
  mirror->list[mirror->nlist++] = record;
}

static void mirror_none_due(mlfab__mirror *mirror) {
  for (uint32_t i = 0; i < mirror->nlist; i++) mirror->records[mirror->list[i]].due = 0;
  mirror->nlist = 0;
}

/* Ends: no stream is under way. */
static void mirror_end_stream(mlfab__mirror *mirror) {
  if (mirror->serves) mirror_none_due(mirror);
  mirror->stream = 0;
  mirror->first = 0;
  mirror->begun = mirror->unmarked = mirror->follows = 0;
}

static void mirror_begin_stream(mlfab__mirror *mirror, uint64_t now_ns) {
  mirror_end_stream(mirror);
  mirror->stream = ++mirror->streams;
  mirror->begun_ns = now_ns;
  for (uint32_t p = 0; p < mirror->nparts; p++) mirror_untouch(&mirror->parts[p].touch);
  /* From the last to the first: the list is a stack. */
  for (uint32_t r = mirror->nrecords; r-- > 0;) {
    mirror_due(mirror, r);
  }
}

/* Has the record changed since it was last sent? */
static int mirror_changed(mlfab__mirror *mirror, uint32_t record) {
  const mlfab__mirror_record *known = &mirror->records[record];
  uint32_t n = mirror_encode(mirror, record, mirror->scratch);
  return !known->bytes || known->n != n || memcmp(known->bytes, mirror->scratch, n) != 0;
}

/* Finds the records that have changed. */
static void mirror_compare(mlfab__mirror *mirror) {
  for (uint32_t p = 0; p < mirror->nparts; p++) {
    mlfab__mirror_part *part = &mirror->parts[p];
    mlfab__touch *touch = &part->touch;
    for (uint32_t i = 0; touch->all && i < part->mirrored.records; i++)
      if (mirror_changed(mirror, part->first + i)) mirror_due(mirror, part->first + i);
    for (uint32_t i = 0; !touch->all && i < touch->n; i++)
      if (mirror_changed(mirror, part->first + touch->list[i]))
        mirror_due(mirror, part->first + touch->list[i]);
    mirror_untouch(touch);
  }
}

static uint32_t mirror_encode_begins(const mlfab__mirror *mirror, uint8_t *meta) {
  for (uint32_t p = 0; p < mirror->nparts; p++) {
    uint32_t n = mirror->parts[p].mirrored.records;
    for (uint32_t k = 0; k < 4; k++) meta[4 * p + k] = (uint8_t)(n >> 8 * k);
  }
  return 4 * mirror->nparts;
}

MLFAB__INTERNAL int mlfab__mirror_next(mlfab__mirror *mirror, mlfab__frame_out *frame) {
  if (!mirror->stream) return 0;
  mlfab__mirror_frame head = {.number = mirror->number + 1,
                              .term = mirror->term,
                              .stream = mirror->stream,
                              .part = MLFAB__MIRROR_MARK};
  uint8_t *body = frame->meta + MLFAB__MIRROR_FRAME_BYTES;
  uint32_t n = 0;
  if (!mirror->begun) {
    head.part = MLFAB__MIRROR_BEGINS;
    n = mirror_encode_begins(mirror, body);
  } else if (mirror->nlist > 0) {
    uint32_t record = mirror->list[mirror->nlist - 1];
    const mlfab__mirror_part *part = mirror_part_of(mirror, record);
    head.part = (uint32_t)(part - mirror->parts);
    head.record = record - part->first;
    n = mirror_encode(mirror, record, body);
  } else if (!mirror->unmarked) {
    return 0;
  }
  frame->type = MLFAB__MIRROR;
  frame->meta_bytes = mlfab__encode_mirror_frame(frame->meta, &head) + n;
  return 1;
}

MLFAB__INTERNAL void mlfab__mirror_taken(mlfab__mirror *mirror, const mlfab__frame_out *frame,
                                         uint64_t now_ns) {
  mlfab__mirror_frame head;
  const uint8_t *body = frame->meta + MLFAB__MIRROR_FRAME_BYTES;
  (void)mlfab__decode_mirror_frame(frame->meta, MLFAB__MIRROR_FRAME_BYTES, &head);
  if (head.part == MLFAB__MIRROR_BEGINS) {
    mirror->begun = 1;
    mirror->begun_ns = now_ns;
  } else if (head.part == MLFAB__MIRROR_MARK) {
    mirror->number = head.number;
    if (mirror->first == 0) mirror->first = head.number;
    mirror->unmarked = 0;
  } else {
    uint32_t record = mirror->list[--mirror->nlist];
    mlfab__mirror_record *known = &mirror->records[record];
    known->due = 0;
    mirror->unmarked = 1;
    /* Without memory the record counts as changed at the next touch. */
    (void)mirror_keep(mirror->env, &known->bytes, &known->n, body,
                      frame->meta_bytes - MLFAB__MIRROR_FRAME_BYTES);
  }
}

static int mirror_take_has(mlfab__mirror *mirror, const mlfab__frame_in *frame, uint64_t now_ns,
                           uint64_t beat_ns) {
  mlfab__mirror_has in;
  if (mlfab__decode_mirror_has(frame->meta, frame->meta_bytes, &in)) return MLFAB_ERR_FRAME;
  if (!mirror->stream) return 0;
  if (in.stream == 0) {
    if (mirror->begun && now_ns - mirror->begun_ns >= beat_ns) mirror_begin_stream(mirror, now_ns);
    return 0;
  }
  if (in.term != mirror->term || in.stream != mirror->stream) return 0;
  if (in.number > mirror->number) return MLFAB_ERR_FRAME;
  mirror->has = mlfab__max(mirror->has, in.number);
  if (mirror->first > 0 && in.number >= mirror->first) mirror->follows = 1;
  return 0;
}

/* --- receiver --- */

static void mirror_say(mlfab__mirror *mirror) {
  const mlfab__mirror_has has = {mirror->whole ? mirror->got : 0,
                                 mirror->stream_in ? mirror->term_in : 0, mirror->stream_in};
  MLFAB__POST(&mirror->out, mirror->peer, MLFAB__MIRROR_HAS, mirror_has, &has);
}

/* Voids the staged records, and stops taking the stream. */
static void mirror_void(mlfab__mirror *mirror) {
  for (uint32_t i = 0; i < mirror->nlist; i++) {
    mlfab__mirror_record *record = &mirror->records[mirror->list[i]];
    mirror_lose(mirror->env, &record->staged, &record->nstaged);
  }
  mirror->nlist = 0;
  mirror->stream_in = 0;
  mirror->whole = 0;
}

static int mirror_take_begins(mlfab__mirror *mirror, const mlfab__mirror_frame *head,
                              const uint8_t *body, uint32_t n) {
  uint8_t ours[4 * MLFAB__MIRRORED_MAX];
  mirror_void(mirror);
  if (head->stream == 0 || n != mirror_encode_begins(mirror, ours) || memcmp(body, ours, n) != 0)
    return MLFAB_ERR_FRAME;
  mirror->stream_in = head->stream;
  mirror->term_in = head->term;
  return 0;
}

static int mirror_take_record(mlfab__mirror *mirror, const mlfab__mirror_frame *head,
                              const uint8_t *body, uint32_t n) {
  if (head->part >= mirror->nparts || n > MLFAB__MIRRORED_BYTES) return MLFAB_ERR_FRAME;
  const mlfab__mirror_part *part = &mirror->parts[head->part];
  if (head->record >= part->mirrored.records ||
      part->mirrored.decode(part->mirrored.self, head->record, body, n, 0))
    return MLFAB_ERR_FRAME;
  mlfab__mirror_record *record = &mirror->records[part->first + head->record];
  if (!record->staged) mirror->list[mirror->nlist++] = part->first + head->record;
  if (!mirror_keep(mirror->env, &record->staged, &record->nstaged, body, n)) return 0;
  mirror_void(mirror); /* no memory: it says so, and then gets all records again */
  return 0;
}

/* Makes the staged records valid. */
static int mirror_take_mark(mlfab__mirror *mirror, const mlfab__mirror_frame *head) {
  if (head->record != 0 || head->number == 0 ||
      (!mirror->whole && mirror->nlist != mirror->nrecords))
    return MLFAB_ERR_FRAME;
  for (uint32_t i = 0; i < mirror->nlist; i++) {
    mlfab__mirror_record *record = &mirror->records[mirror->list[i]];
    mirror_lose(mirror->env, &record->bytes, &record->n);
    record->bytes = record->staged;
    record->n = record->nstaged;
    record->staged = NULL;
    record->nstaged = 0;
  }
  mirror->nlist = 0;
  mirror->whole = 1;
  mirror->got = head->number;
  mirror_say(mirror);
  return 0;
}

static int mirror_take(mlfab__mirror *mirror, const mlfab__frame_in *frame) {
  mlfab__mirror_frame head;
  if (frame->meta_bytes < MLFAB__MIRROR_FRAME_BYTES || frame->bulk_bytes > 0 ||
      mlfab__decode_mirror_frame(frame->meta, MLFAB__MIRROR_FRAME_BYTES, &head))
    return MLFAB_ERR_FRAME;
  if (mirror->serves) return 0;
  if (!mirror->facts.takes) {
    mirror_void(mirror);
    return 0;
  }
  const uint8_t *body = frame->meta + MLFAB__MIRROR_FRAME_BYTES;
  uint32_t n = frame->meta_bytes - MLFAB__MIRROR_FRAME_BYTES;
  if (head.part == MLFAB__MIRROR_BEGINS) return mirror_take_begins(mirror, &head, body, n);
  if (head.stream != mirror->stream_in || head.term != mirror->term_in) {
    if (mirror->stream_in) mirror_void(mirror);
    return 0;
  }
  if (head.part == MLFAB__MIRROR_MARK)
    return n > 0 ? MLFAB_ERR_FRAME : mirror_take_mark(mirror, &head);
  return mirror_take_record(mirror, &head, body, n);
}

MLFAB__INTERNAL int mlfab__mirror_hear(mlfab__mirror *mirror, const mlfab__frame_in *frame,
                                       uint64_t now_ns, uint64_t beat_ns) {
  if (frame->type == MLFAB__MIRROR_HAS) return mirror_take_has(mirror, frame, now_ns, beat_ns);
  int code = mirror_take(mirror, frame);
  if (code) mirror_void(mirror);
  return code;
}

/* --- who serves --- */

/* Gives the parts the records of the last mark. The records were checked before. */
static void mirror_apply(mlfab__mirror *mirror) {
  for (uint32_t p = 0; p < mirror->nparts; p++) {
    const mlfab__mirror_part *part = &mirror->parts[p];
    for (uint32_t i = 0; i < part->mirrored.records; i++) {
      const mlfab__mirror_record *record = &mirror->records[part->first + i];
      int code = part->mirrored.decode(part->mirrored.self, i, record->bytes, record->n, 1);
      assert(code == 0);
      (void)code;
    }
    if (part->mirrored.begin) part->mirrored.begin(part->mirrored.self);
  }
}

MLFAB__INTERNAL void mlfab__mirror_serve(mlfab__mirror *mirror, uint32_t term) {
  if (!mirror || mirror->serves) return;
  mirror_void(mirror);
  mirror->serves = 1; /* the frames that the parts send as they begin are posted */
  mirror->term = term;
  mirror->number = mirror->has = mirror->told = 0;
  mirror_end_stream(mirror);
  if (mirror->got > 0) mirror_apply(mirror);
  mirror->got = 0;
}

MLFAB__INTERNAL void mlfab__mirror_stand_by(mlfab__mirror *mirror) {
  if (!mirror || !mirror->serves) return;
  mirror_end_stream(mirror);
  mirror->serves = 0;
  mirror->got = 0;
  mirror->said_ns = 0;
  mirror_forget_all(mirror);
}

MLFAB__INTERNAL void mlfab__mirror_link(mlfab__mirror *mirror, int up) {
  mirror->link_up = up;
  if (mirror->serves) mirror_end_stream(mirror);
  if (up && !mirror->serves && mirror->stream_in) mirror_say(mirror); /* the last may be lost */
}

MLFAB__INTERNAL void mlfab__mirror_cut(mlfab__mirror *mirror) {
  if (!mirror->serves) mirror_void(mirror);
}

MLFAB__INTERNAL void mlfab__mirror_look(mlfab__mirror *mirror, uint64_t now_ns, uint64_t beat_ns) {
  if (!mirror->serves) {
    for (uint32_t p = 0; p < mirror->nparts; p++) mirror_untouch(&mirror->parts[p].touch);
    if (!mirror->facts.takes || mirror->stream_in ||
        (mirror->said_ns && now_ns - mirror->said_ns < beat_ns))
      return;
    mirror->said_ns = mlfab__max(now_ns, 1);
    mirror_say(mirror);
    return;
  }
  if (mirror->link_up && !mirror->stream) mirror_begin_stream(mirror, now_ns);
  if (mirror->stream) mirror_compare(mirror);
  if (mirror->stream && (!mirror->begun || mirror->nlist > 0 || mirror->unmarked))
    mirror->out.ready(mirror->out.self, mirror->peer);
  mirror_judge(mirror);
  mirror_release(mirror);
}

MLFAB__INTERNAL uint64_t mlfab__mirror_deadline(const mlfab__mirror *mirror, uint64_t beat_ns) {
  if (mirror->serves || !mirror->facts.takes || mirror->stream_in) return UINT64_MAX;
  return mirror->said_ns + beat_ns;
}

MLFAB__INTERNAL void mlfab__mirror_free(mlfab__mirror *mirror) {
  mlfab__env *env = mirror->env;
  if (!env) return;
  mirror_forget_all(mirror);
  mlfab__free(env, mirror->items, mirror->room * sizeof *mirror->items);
  for (uint32_t r = 0; mirror->records && r < mirror->nrecords; r++) {
    mlfab__mirror_record *record = &mirror->records[r];
    mirror_lose(env, &record->bytes, &record->n);
    mirror_lose(env, &record->staged, &record->nstaged);
  }
  for (uint32_t p = 0; p < mirror->nparts; p++) {
    mlfab__mirror_part *part = &mirror->parts[p];
    mlfab__free(env, part->touch.marked, part->mirrored.records);
    mlfab__free(env, part->touch.list, part->mirrored.records * sizeof *part->touch.list);
  }
  mlfab__free(env, mirror->records, mirror->nrecords * sizeof *mirror->records);
  mlfab__free(env, mirror->list, mirror->nrecords * sizeof *mirror->list);
  mlfab__free(env, mirror->scratch, MLFAB__MIRRORED_BYTES);
  memset(mirror, 0, sizeof *mirror);
}
