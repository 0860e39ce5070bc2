/* resident.h - a server's model in memory of a device. */
#ifndef MLFAB__RESIDENT_H
#define MLFAB__RESIDENT_H

#include "../node/node.h"
#include "../../mlfab_device.h"
#include "../server/server.h"

/* Puts the models of this server into memory of config.device. Errors: CONFIG, naming the missing function of the
 * device; MEMORY; DEVICE. */
MLFAB__INTERNAL int mlfab__resident_attach(mlfab_node *node, mlfab__server *server,
                                           mlfab_error *error);

#endif
