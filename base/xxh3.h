// xxHash, with the vectors that the processor has: twice as fast as the functions of the same names
// that know none of it.
#pragma once

#define XXH_STATIC_LINKING_ONLY  // the state of a hash
#include <xxhash.h>

#if defined(__x86_64__) && __has_include(<xxh_x86dispatch.h>)
#include <xxh_x86dispatch.h>
#endif
