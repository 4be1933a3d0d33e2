/* The SHA-256 compression function, in the version for this CPU. Private to csrc. */
#ifndef PENSTOCK_SHA256_H
#define PENSTOCK_SHA256_H

#include <stddef.h>
#include <stdint.h>

extern const uint32_t sha256_initial[8];

/* Apply the compression function to `count` chunks of 64 bytes. */
typedef void sha256_compress(uint32_t state[8], const uint8_t *chunks, size_t count);

sha256_compress sha256_compress_portable;

/* The version with SHA instructions if the CPU has them, otherwise the portable one. */
sha256_compress *sha256_compress_fastest(void);

#endif
