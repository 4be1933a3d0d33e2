/* The SHA-256 compression function, and which of its two forms this CPU runs. Private to csrc. */
#ifndef PENSTOCK_SHA256_H
#define PENSTOCK_SHA256_H

#include <stddef.h>
#include <stdint.h>

extern const uint32_t sha256_initial[8];

/* Folds `count` chunks of 64 bytes into the state. */
typedef void sha256_compress(uint32_t state[8], const uint8_t *chunks, size_t count);

sha256_compress sha256_compress_portable;

/* The SHA instructions if the CPU has them, the portable form otherwise. */
sha256_compress *sha256_compress_fastest(void);

#endif
