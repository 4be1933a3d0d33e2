/* Block keys: a SHA-256 chain over blocks of token ids. cache/keys.py calls this after it has checked sizes and ids.
 * Tokens are little-endian bytes, so a key is the same on every host. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "keys.cdef.h"
#include "sha256.h"

static void store_big_endian(uint8_t *p, uint64_t value, int num_bytes) {
    for (int i = 0; i < num_bytes; i++) p[i] = (uint8_t)(value >> 8 * (num_bytes - 1 - i));
}

/* out = SHA-256(key, tokens) */
static void hash_block(sha256_compress *compress, const uint8_t *key, const uint8_t *tokens, size_t num_bytes,
                       uint8_t *out) {
    uint32_t state[8];
    memcpy(state, sha256_initial, sizeof state);
    uint64_t message_bits = 8 * (32 + (uint64_t)num_bytes);

    uint8_t tail[128] = {0}; /* the remainder below 64 bytes, the 1 bit, zeros, the length */
    size_t left;
    memcpy(tail, key, 32);
    if (num_bytes < 32) {
        memcpy(tail + 32, tokens, num_bytes);
        left = 32 + num_bytes;
    } else {
        memcpy(tail + 32, tokens, 32);
        compress(state, tail, 1);
        size_t whole = (num_bytes - 32) / 64;
        compress(state, tokens + 32, whole);
        left = (num_bytes - 32) % 64;
        memcpy(tail, tokens + num_bytes - left, left);
        memset(tail + left, 0, 64 - left);
    }
    tail[left] = 0x80;
    size_t num_chunks = left < 56 ? 1 : 2;
    store_big_endian(tail + 64 * num_chunks - 8, message_bits, 8);
    compress(state, tail, num_chunks);
    for (int i = 0; i < 8; i++) store_big_endian(out + 4 * i, state[i], 4);
}

void penstock_block_keys(const uint8_t *root, const uint8_t *tokens, size_t num_blocks, size_t block_size,
                         int portable, uint8_t *out) {
    sha256_compress *compress = portable ? sha256_compress_portable : sha256_compress_fastest();
    const size_t block_bytes = 4 * block_size;
    for (size_t i = 0; i < num_blocks; i++, root = out, out += 32)
        hash_block(compress, root, tokens + i * block_bytes, block_bytes, out);
}

int penstock_has_sha_instructions(void) { return sha256_compress_fastest() != sha256_compress_portable; }
