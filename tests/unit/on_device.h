/* on_device.h - include it first: with MLFAB_PLAYED=1 in the environment, the servers that a test opens have their
 * models on devices that are played. */
#ifndef ON_DEVICE_H
#define ON_DEVICE_H

#include "played_model.h"

#include "mlfab_sim.h"

enum { ON_DEVICE_MOST = 4096 };

static played *on_device_all[ON_DEVICE_MOST];
static uint32_t on_device_host[ON_DEVICE_MOST], on_device_used;

/* At the end of the program: each device has got back what it gave. */
static inline void on_device_end(void) {
  for (uint32_t i = 0; i < on_device_used; i++) played_model_end(on_device_all[i]);
  on_device_used = 0;
}

static inline int on_device_sim_open(mlfab_sim *sim, uint32_t host, const mlfab_config *config,
                                     mlfab **node_p, mlfab_error *error) {
  const char *played_too = getenv("MLFAB_PLAYED");
  mlfab_config c = *config;
  if (played_too && played_too[0] == '1' && !c.device && !c.on_update && c.size >= sizeof c) {
    assert_true(on_device_used < ON_DEVICE_MOST);
    if (on_device_used == 0) (void)atexit(on_device_end);
    on_device_all[on_device_used] = played_model_begin(c.seed + host);
    on_device_host[on_device_used] = host;
    c.device = &played_model_device;
    c.device_self = on_device_all[on_device_used++];
  }
  return mlfab_sim_open(sim, host, &c, node_p, error);
}
#define mlfab_sim_open on_device_sim_open

/* The device that a host had last is lost. 0: it has none. */
static inline int on_device_lose(uint32_t host) {
  uint32_t i = on_device_used;
  while (i > 0 && on_device_host[i - 1] != host) i--;
  if (i == 0) return 0;
  played_lose(on_device_all[i - 1]);
  return 1;
}

#endif
