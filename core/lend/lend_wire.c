/* lend_wire.c - the fields of these frames. See lend_wire.h and codec.h. */
#include "lend_wire.h"

#include "../wire/codec.h"

#define N(member) wire_codec_number(c, decode, &m->member, sizeof m->member);

/* clang-format off */
WIRE_FIELDS(view_run, mlfab__view_run, N(offset) N(bytes) N(at))
WIRE_LIST(view, runs, view_run, mlfab__view_run, 24, MLFAB__VIEW_RUNS_MAX, N(request) N(version) N(file) N(ask) N(flags) N(oldest))
/* clang-format on */

#undef N
