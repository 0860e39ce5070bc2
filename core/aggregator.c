/* aggregator.c - the aggregator role. See aggregator.h. */
#include "aggregator.h"
