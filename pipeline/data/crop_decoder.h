/* JPEG bytes -> the resized crop. */
#ifndef CROP_DECODER_H
#define CROP_DECODER_H

#include <stddef.h>
#include <stdint.h>

#include "library.h"
#include "scratch.h"
#include "view_resize.h"

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
_Static_assert(sizeof(struct request) == 76, "as in crop_decoder.py");

/* Fills `out`, uint8[height, width, 3] of the target. */
int decode_view(const uint8_t *data, size_t num_bytes, const struct request *request, struct scratch *scratch,
                uint8_t *out);

/* The same, with scratch memory of its own. */
EXPORTED int32_t crop_decoder_view(const uint8_t *data, size_t num_bytes, const struct request *request, uint8_t *out);

#endif
