/* Memory that the images of a chunk use in turn. */
#ifndef SCRATCH_H
#define SCRATCH_H

#include <stddef.h>
#include <stdint.h>

/* Begins as zeros. */
struct scratch {
    uint8_t *bytes;
    size_t num_bytes;
    struct huffman_decoder *huffman;
};

/* Makes sure that scratch->bytes has at least num_bytes, with anything in them. Returns 0 if memory runs out. */
int scratch_has(struct scratch *scratch, size_t num_bytes);

void free_scratch(struct scratch *scratch);

#endif
