/* What the C files of the loader share: pixels, requests of views, and operations on a view. */
#ifndef SAMPLE_VIEWS_H
#define SAMPLE_VIEWS_H

#include <stddef.h>
#include <stdint.h>

#include "view_resize.h"

#define EXPORTED __attribute__((visibility("default"))) /* all other functions are hidden (hatch_build.py) */

enum { LEFT_TO_OTHERS = 0, DONE = 1 };

/* One view of a JPEG. */
struct request {
    int32_t stored_height, stored_width;                /* what the header must say */
    int32_t denominator;                                /* 1, 2, 4 or 8: decode at 1 / denominator */
    int32_t top, left, height, width;                   /* the crop, in the decoded image as stored */
    int32_t is_exchanged, is_upside_down, is_leftright; /* how it is turned upright: exchange first, then mirror */
    int32_t is_antialiased;
    int32_t leaves_huffman; /* libjpeg-turbo decodes the Huffman codes, not huffman_decoder.c */
    struct target target;
};

/* What the images of a chunk use in turn. Begins as zeros. */
struct scratch {
    uint8_t *bytes;
    size_t num_bytes;
    struct huffman_decoder *huffman;
};

void free_scratch(struct scratch *scratch);

/* At least num_bytes in scratch->bytes, with anything in them. 0 where memory runs out. */
int scratch_has(struct scratch *scratch, size_t num_bytes);

/* DONE: `out` is filled. LEFT_TO_OTHERS: the other decoder has to say what is wrong, if anything. */
int decode_view(const uint8_t *data, size_t num_bytes, const struct request *request, struct scratch *scratch,
                uint8_t *out);

/* One RandAugment operation, by its place in randaugment.py's OPERATIONS. */
struct operation {
    int32_t number, magnitude, sign;
    double row, column; /* the centre of Cutout, as shares of the image */
};

/* Changes uint8[height, width, 3] in place. LEFT_TO_OTHERS, with the pixels as they were, if it cannot. */
int apply_operation(uint8_t *pixels, int32_t height, int32_t width, const struct operation *operation,
                    struct scratch *scratch);

#endif
