/* monitor.h - what a host's network links carry, told from what passed through them. Layer 2. */
#ifndef MLFAB__MONITOR_H
#define MLFAB__MONITOR_H

#include "../mlfab.h"
#include "base.h"

#endif
