/* The types of addresses in the structs of *.cdef.h. Python sees them as integers (build.py), so that it passes
 * data_ptr() without a cast; 0 is NULL. The comment of a field has the shape. */
#ifndef PENSTOCK_ADDRESSES_H
#define PENSTOCK_ADDRESSES_H

#include <stddef.h>
#include <stdint.h>

typedef const void *inputs; /* numbers of the model's dtype, or of the dtype that the comment names */
typedef void *outputs;
typedef const float *floats;
typedef const int32_t *int32s;
typedef const int64_t *int64s;
typedef const uint8_t *uint8s;

#endif
