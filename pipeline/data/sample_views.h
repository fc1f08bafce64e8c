/* Samples of a batch -> their augmented views. */
#ifndef SAMPLE_VIEWS_H
#define SAMPLE_VIEWS_H

#include <stddef.h>
#include <stdint.h>

#include "crop_decoder.h"
#include "library.h"

/* How the samples of a run are augmented: the values of AugmentConfig and RandAugmentConfig. */
struct settings {
    double min_area, max_area, min_ratio, max_ratio;
    int32_t crop, late_crop;
    int32_t size;          /* of the view: size x size */
    int32_t resize_pixels; /* of a late crop */
    int32_t flip, is_antialiased, scaled_decode, exif;
    int32_t num_ops, magnitude;
    int32_t leaves_huffman; /* as in struct request */
};
_Static_assert(sizeof(struct settings) == 80, "as in crop_decoder.py");

/* One sample as the index describes it. */
struct sample {
    const uint8_t *data;
    uint64_t num_bytes;
    int64_t sample_id;
    uint64_t crop_key, operation_key; /* of shards/hashing.py: CROPS, OPERATIONS */
    uint32_t crc32;
    int32_t height, width, orientation; /* as stored */
};
_Static_assert(sizeof(struct sample) == 56, "as in crop_decoder.py");

/* Fills the views of `count` samples, uint8[count, size, size, 3]. are_done[i] is 0, with anything in the view, for a
 * sample that the other decoder must try. */
EXPORTED void sample_views_fill(const struct sample *samples, int32_t count, const struct settings *settings,
                                uint8_t *views, uint8_t *are_done);

/* For tests: what is planned for a sample. */
EXPORTED int32_t sample_views_plan(const struct sample *sample, const struct settings *settings,
                                   struct request *request);

/* 1 if this processor computes CRC-32 fast. If not, the caller has to check the bytes. */
EXPORTED int32_t sample_views_checks_crc32(void);

/* zlib's CRC-32. */
EXPORTED uint32_t sample_views_crc32(const uint8_t *data, size_t num_bytes);

#endif
