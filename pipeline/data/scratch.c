#include "scratch.h"

#include <stdlib.h>

#include "huffman_decoder.h"

int scratch_has(struct scratch *scratch, size_t num_bytes)
{
    if (scratch->num_bytes >= num_bytes)
        return 1;
    free(scratch->bytes);
    scratch->bytes = malloc(num_bytes);
    scratch->num_bytes = scratch->bytes ? num_bytes : 0;
    return scratch->bytes != NULL;
}

void free_scratch(struct scratch *scratch)
{
    free(scratch->bytes);
    free_huffman_decoder(scratch->huffman);
}
