/* ports.h - the functions of a port whose calls a test does not look at. */
#ifndef MLFAB_TEST_PORTS_H
#define MLFAB_TEST_PORTS_H

#include <stdint.h>

static inline void no_ready(void *self, uint32_t peer) { (void)self, (void)peer; }
static inline void no_detach(void *self, uint32_t peer, uint64_t token) {
  (void)self, (void)peer, (void)token;
}
static inline void no_event(void *self, uint32_t kind, int32_t rank, int is_server,
                            uint32_t incarnation, int code, const char *text) {
  (void)self, (void)kind, (void)rank, (void)is_server, (void)incarnation, (void)code, (void)text;
}

#endif
