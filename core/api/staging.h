/* staging.h - calls on device memory (mlfab_device.h). */
#ifndef MLFAB__STAGING_H
#define MLFAB__STAGING_H

#include "context.h"
#include "../../mlfab_device.h"

/* Refuses device memory until a device is attached, in programs that have code for one. */
MLFAB__INTERNAL void mlfab__staging_guard(mlfab *ctx);

#endif
