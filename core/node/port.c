/* port.c - a role's port. See port.h. */
#include "port.h"

#include <stdio.h>

MLFAB__INTERNAL int mlfab__port_refuse(const mlfab__port *port, uint32_t peer,
                                       const mlfab__frame_in *frame, int wrong) {
  char text[64];
  if (!wrong) return 0;
  snprintf(text, sizeof text, "a malformed %s", mlfab__frame_name(frame->type));
  port->drop(port->self, peer, MLFAB_ERR_FRAME, text);
  return 1;
}
