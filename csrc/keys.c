/* Block keys: a SHA-256 chain over blocks of token ids, and the 64-bit v1 chain that routers of TensorRT-LLM use.
 *
 * Called by cache/keys.py, which has checked sizes and ids. Everything reads bytes in little-endian order, so a
 * key is the same on every host. Constants and formulas of v1: TensorRT-LLM, kv_cache_hash.py. */
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

    uint8_t tail[128] = {0}; /* what is left below 64 bytes, the 1 bit, zeros, the length */
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

static const uint64_t v1_spread = 0x9e3779b9;

static inline uint32_t load_little_endian(const uint8_t *p) {
    return (uint32_t)p[3] << 24 | (uint32_t)p[2] << 16 | (uint32_t)p[1] << 8 | p[0];
}

static inline uint64_t v1_step(uint64_t state, uint64_t y) { return state ^ (y + (state << 6) + (state >> 2)); }

static inline uint32_t v1_scatter_32(uint32_t x) {
    x = (x >> 16 ^ x) * 0x45d9f3bu;
    x = (x >> 16 ^ x) * 0x45d9f3bu;
    return (x >> 16 ^ x) + (uint32_t)v1_spread; /* wraps at 32 bits, before it is widened */
}

static inline uint64_t v1_scatter_64(uint64_t x) {
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return (x ^ x >> 31) + v1_spread;
}

static inline uint64_t v1_key(const uint8_t *tokens, size_t count, uint64_t parent, const uint64_t *salt_id,
                              const uint64_t *lora_id) {
    uint64_t state = count ^ parent * 0xbf58476d1ce4e5b9u;
    if (salt_id && parent == 0) state = v1_step(state, v1_scatter_64(*salt_id));
    for (size_t i = 0; i < count; i++) state = v1_step(state, v1_scatter_32(load_little_endian(tokens + 4 * i)));
    return lora_id ? v1_step(state, v1_scatter_64(*lora_id)) : state;
}

void penstock_block_keys_v1(const uint8_t *tokens, size_t num_tokens, size_t block_size, const uint64_t *salt_id,
                            const uint64_t *lora_id, uint64_t *out) {
    uint64_t key = 0;
    for (size_t start = 0; start < num_tokens; start += block_size) {
        size_t count = num_tokens - start < block_size ? num_tokens - start : block_size;
        *out++ = key = v1_key(tokens + 4 * start, count, key, salt_id, lora_id);
    }
}
