/* resident.h - a server's model in memory of a device. Layer 5. */
#ifndef MLFAB__RESIDENT_H
#define MLFAB__RESIDENT_H

#include "../node/node.h"
#include "../../mlfab_device.h"
#include "../server/server.h"

/* The models of this server will be in memory of config.device. Errors: CONFIG, naming the function that the device lacks; MEMORY;
 * DEVICE. */
MLFAB__INTERNAL int mlfab__resident_attach(mlfab_node *node, mlfab__server *server,
                                           mlfab_error *error);

#endif
