/* Block keys (cache/keys.py). Tokens are little-endian 32-bit ids in bytes, whatever the host's byte order. */

/* out[0] = SHA-256(root, tokens of block 0), out[i] = SHA-256(out[i-1], tokens of block i); 32 bytes each. */
void penstock_block_keys(const uint8_t *root, const uint8_t *tokens, size_t num_blocks, size_t block_size,
                         int portable, uint8_t *out);

/* 1 if the CPU's SHA instructions are in use. */
int penstock_has_sha_instructions(void);
