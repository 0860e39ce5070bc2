/* losses.h - a worker whose server is replaced by its replica: counts what is lost. Layer 5. */
#ifndef MLFAB__LOSSES_H
#define MLFAB__LOSSES_H

#include "../worker/worker.h"

/* Servers have replicas. */
MLFAB__INTERNAL void mlfab__losses_attach(mlfab__worker *worker);

#endif
