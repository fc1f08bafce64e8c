/* Bilinear resizing of a rectangle of RGB pixels into a view: used by crop_decoder.c. */
#ifndef VIEW_RESIZE_H
#define VIEW_RESIZE_H

#include <stddef.h>
#include <stdint.h>

/* Pixels as they are seen: the first one and the steps in bytes to the next row and column, either of which may be
 * negative or exchanged, so that a turned or mirrored image needs no copy. Of each pixel three bytes are read. */
struct pixels {
    const uint8_t *first;
    ptrdiff_t row_step, column_step;
    int32_t height, width;
};

/* The pixels are resized to resized_height x resized_width; of that, the window of height x width from (top, left) is
 * wanted, mirrored if asked for. */
struct target {
    int32_t resized_height, resized_width;
    int32_t top, left, height, width;
    int32_t is_mirrored;
};

/* Both write uint8[height, width, 3]. 0 where memory runs out. */
int resize_plain(const struct pixels *source, const struct target *target, uint8_t *out);
int resize_antialiased(const struct pixels *source, const struct target *target, uint8_t *out);

#endif
