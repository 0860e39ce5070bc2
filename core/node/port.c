/* port.c - a role's port. See port.h. */
#include "port.h"

#include <stdio.h>

MLFAB__INTERNAL int mlfab__port_stalled(const mlfab__port *port, uint32_t peer, int to_peer,
                                        uint64_t since_ns, uint64_t now_ns, uint64_t patience_ns,
                                        uint64_t most_ns) {
  uint64_t passed_ns = now_ns - mlfab__min(since_ns, now_ns);
  if (passed_ns < patience_ns) return 0;
  return passed_ns >= most_ns || !port->silent ||
         port->silent(port->self, peer, to_peer) >= patience_ns;
}

MLFAB__INTERNAL uint64_t mlfab__port_stalls_at(uint64_t since_ns, uint64_t now_ns,
                                               uint64_t patience_ns, uint64_t most_ns) {
  uint64_t first_ns = mlfab__add_sat(since_ns, patience_ns);
  if (first_ns > now_ns) return first_ns;
  return mlfab__min(mlfab__add_sat(now_ns, patience_ns / 4 + 1),
                    mlfab__add_sat(since_ns, mlfab__max(most_ns, patience_ns)));
}

MLFAB__INTERNAL int mlfab__port_refuse(const mlfab__port *port, uint32_t peer,
                                       const mlfab__frame_in *frame, int wrong) {
  char text[64];
  if (!wrong) return 0;
  snprintf(text, sizeof text, "a malformed %s", mlfab__frame_name(frame->type));
  port->drop(port->self, peer, MLFAB_ERR_FRAME, text);
  return 1;
}
