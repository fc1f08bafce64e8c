/* RandAugment's operations on a view. */
#ifndef VIEW_OPERATIONS_H
#define VIEW_OPERATIONS_H

#include <stdint.h>

#include "library.h"
#include "scratch.h"

/* One operation, by its place in randaugment.py's OPERATIONS. */
struct operation {
    int32_t number, magnitude, sign;
    double row, column; /* the centre of Cutout, as shares of the image */
};
_Static_assert(sizeof(struct operation) == 32, "as in crop_decoder.py");

/* Changes uint8[height, width, 3] in place. If it returns LEFT_TO_OTHERS, the pixels are unchanged. */
int apply_operation(uint8_t *pixels, int32_t height, int32_t width, const struct operation *operation,
                    struct scratch *scratch);

/* The same, with scratch memory of its own. */
EXPORTED int32_t view_operations_apply(uint8_t *pixels, int32_t height, int32_t width,
                                       const struct operation *operation);

#endif
