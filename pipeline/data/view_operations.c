/* RandAugment's operations as in randaugment.py, which says what each does and why: the same pixels to the bit.
 *
 * Sums and products are rounded to fp32 one by one, as NumPy does it (hatch_build.py forbids fused ones).
 */
#include "view_operations.h"

#include <math.h>
#include <string.h>

enum { CHANNELS = 3, LEVELS = 256, FILL = 128 };
enum { MOST_VIEW_SIDE = 8192 }; /* places in a moved image fit 16 bits, counts of pixels 24 */
enum { MOST_MAGNITUDE = 20 };

enum number { /* in the order of OPERATIONS */
    AUTO_CONTRAST,
    EQUALIZE,
    INVERT,
    ROTATE,
    POSTERIZE,
    SOLARIZE,
    COLOR,
    CONTRAST,
    BRIGHTNESS,
    SHARPNESS,
    SHEAR_X,
    SHEAR_Y,
    TRANSLATE_X,
    TRANSLATE_Y,
    CUTOUT,
    SOLARIZE_ADD,
};

typedef uint8_t tables[CHANNELS][LEVELS];

static uint8_t cut(float value)
{
    return (uint8_t)(value < 0.0f ? 0.0f : value > 255.0f ? 255.0f : value);
}

static float factor_of(int magnitude)
{
    return (float)(magnitude / 10.0 * 1.8 + 0.1);
}

static uint8_t blend(float start, float end, float factor)
{
    float product = (end - start) * factor;
    return cut(product + start);
}

static void look_up(uint8_t *pixels, size_t num_pixels, tables new_values)
{
    for (size_t i = 0; i < num_pixels; i++, pixels += CHANNELS) {
        pixels[0] = new_values[0][pixels[0]];
        pixels[1] = new_values[1][pixels[1]];
        pixels[2] = new_values[2][pixels[2]];
    }
}

static void count_levels(const uint8_t *pixels, size_t num_pixels, uint32_t counts[CHANNELS][LEVELS])
{
    memset(counts, 0, sizeof(uint32_t) * CHANNELS * LEVELS);
    for (size_t i = 0; i < num_pixels; i++, pixels += CHANNELS)
        for (int channel = 0; channel < CHANNELS; channel++)
            counts[channel][pixels[channel]]++;
}

static void autocontrast_table(const uint32_t counts[LEVELS], uint8_t *table)
{
    int low = 0, high = LEVELS - 1;
    while (low < high && !counts[low])
        low++;
    while (high > low && !counts[high])
        high--;
    float scale = high > low ? 255.0f / (float)(high - low) : 1.0f;
    float offset = high > low ? -(float)low * scale : 0.0f;
    for (int level = 0; level < LEVELS; level++) {
        float product = (float)level * scale;
        table[level] = cut(product + offset);
    }
}

static void equalize_table(const uint32_t counts[LEVELS], size_t num_pixels, uint8_t *table)
{
    int last = LEVELS - 1;
    while (last > 0 && !counts[last])
        last--;
    size_t step = (num_pixels - counts[last]) / 255, below = 0;
    for (int level = 0; level < LEVELS; below += counts[level++]) {
        size_t value = step ? (below + step / 2) / step : (size_t)level;
        table[level] = (uint8_t)(value > 255 ? 255 : value);
    }
}

static void equal_tables(enum number number, int magnitude, size_t num_pixels, tables new_values)
{
    float factor = factor_of(magnitude);
    float grey = (float)(num_pixels / 256 < 255 ? num_pixels / 256 : 255);
    int shift = 8 - magnitude * 4 / 10, threshold = magnitude * 256 / 10 % 256;
    shift = shift > 7 ? 7 : shift;
    for (int level = 0; level < LEVELS; level++) {
        int value = level;
        if (number == INVERT)
            value = 255 - level;
        if (number == POSTERIZE)
            value = level >> shift << shift;
        if (number == SOLARIZE && level >= threshold)
            value = 255 - level;
        if (number == SOLARIZE_ADD && level < 128)
            value = level + 11 * magnitude > 255 ? 255 : level + 11 * magnitude;
        if (number == CONTRAST)
            value = blend(grey, (float)level, factor);
        if (number == BRIGHTNESS)
            value = blend(0.0f, (float)level, factor);
        new_values[0][level] = new_values[1][level] = new_values[2][level] = (uint8_t)value;
    }
}

static void recolour(uint8_t *pixels, size_t num_pixels, int magnitude)
{
    float factor = factor_of(magnitude);
    for (size_t i = 0; i < num_pixels; i++, pixels += CHANNELS) {
        int32_t weighted = 2989 * pixels[0] + 5870 * pixels[1] + 1140 * pixels[2];
        float grey = (float)(weighted * 511 / 5100000);
        for (int channel = 0; channel < CHANNELS; channel++)
            pixels[channel] = blend(grey, (float)pixels[channel], factor);
    }
}

/* `from`: a copy of the pixels. The outermost ones stay. */
static void sharpen(const uint8_t *from, int height, int width, int magnitude, uint8_t *pixels)
{
    float factor = factor_of(magnitude);
    ptrdiff_t row_bytes = (ptrdiff_t)CHANNELS * width;
    for (int y = 1; y < height - 1; y++) {
        const uint8_t *row = from + y * row_bytes, *above = row - row_bytes, *below = row + row_bytes;
        uint8_t *out = pixels + y * row_bytes;
        for (ptrdiff_t i = CHANNELS; i < row_bytes - CHANNELS; i++) {
            int sum = above[i - 3] + above[i] + above[i + 3] + row[i - 3] + 5 * row[i] + row[i + 3] + below[i - 3] +
                      below[i] + below[i + 3];
            out[i] = blend((float)(sum / 13), (float)row[i], factor);
        }
    }
}

/* Where a pixel of the result comes from: place = a x + b y + c. */
struct place {
    float a, b, c;
};

static int rounded(const struct place *of, int x, int y)
{
    float across = of->a * (float)x, down = of->b * (float)y;
    float place = across + down;
    place = place + of->c;
    return (int)(place + copysignf(0.5f, place));
}

static void move(const uint8_t *from, int height, int width, const struct place of[2], uint8_t *pixels)
{
    for (int y = 0; y < height; y++)
        for (int x = 0; x < width; x++, pixels += CHANNELS) {
            int column = rounded(&of[0], x, y), row = rounded(&of[1], x, y);
            if (column >= 0 && column < width && row >= 0 && row < height)
                memcpy(pixels, from + CHANNELS * ((size_t)row * (size_t)width + (size_t)column), CHANNELS);
            else
                memset(pixels, FILL, CHANNELS);
        }
}

static void places_of(const struct operation *operation, int height, int width, struct place of[2])
{
    int sign = operation->sign, magnitude = operation->magnitude;
    struct place x = {1.0f, 0.0f, 0.0f}, y = {0.0f, 1.0f, 0.0f};
    if (operation->number == ROTATE) {
        double angle = sign * 3 * magnitude * (3.141592653589793 / 180.0);
        double cosine = cos(angle), sine = sin(angle), bottom = height - 1, right = width - 1;
        x = (struct place){(float)cosine, (float)-sine, (float)((right - (cosine * right - sine * bottom)) / 2)};
        y = (struct place){(float)sine, (float)cosine, (float)((bottom - (sine * right + cosine * bottom)) / 2)};
    }
    if (operation->number == SHEAR_X)
        x.b = (float)(sign * 0.03 * magnitude);
    if (operation->number == SHEAR_Y)
        y.a = (float)(sign * 0.03 * magnitude);
    if (operation->number == TRANSLATE_X)
        x.c = (float)(sign * 10 * magnitude);
    if (operation->number == TRANSLATE_Y)
        y.c = (float)(sign * 10 * magnitude);
    of[0] = x;
    of[1] = y;
}

static void cut_out(uint8_t *pixels, int height, int width, const struct operation *operation)
{
    int half = 4 * operation->magnitude;
    int row = (int)(operation->row * height), column = (int)(operation->column * width);
    int top = row > half ? row - half : 0, bottom = row + half < height ? row + half : height;
    int left = column > half ? column - half : 0, right = column + half < width ? column + half : width;
    for (int y = top; y < bottom && left < right; y++)
        memset(pixels + CHANNELS * ((size_t)y * (size_t)width + (size_t)left), FILL, CHANNELS * (size_t)(right - left));
}

int apply_operation(uint8_t *pixels, int32_t height, int32_t width, const struct operation *operation,
                    struct scratch *scratch)
{
    int magnitude = operation->magnitude;
    int is_known = height > 0 && width > 0 && height <= MOST_VIEW_SIDE && width <= MOST_VIEW_SIDE && magnitude >= 0 &&
                   magnitude <= MOST_MAGNITUDE && (operation->sign == 1 || operation->sign == -1) &&
                   operation->row >= 0.0 && operation->row < 1.0 && operation->column >= 0.0 && operation->column < 1.0;
    size_t num_pixels = is_known ? (size_t)height * (size_t)width : 0;
    if (!is_known || num_pixels >= 1 << 24 || !scratch_has(scratch, CHANNELS * num_pixels))
        return LEFT_TO_OTHERS;
    tables new_values;
    uint32_t counts[CHANNELS][LEVELS];
    struct place of[2];
    switch ((enum number)operation->number) {
    case AUTO_CONTRAST:
    case EQUALIZE:
        count_levels(pixels, num_pixels, counts);
        for (int channel = 0; channel < CHANNELS; channel++)
            if (operation->number == EQUALIZE)
                equalize_table(counts[channel], num_pixels, new_values[channel]);
            else
                autocontrast_table(counts[channel], new_values[channel]);
        look_up(pixels, num_pixels, new_values);
        return DONE;
    case INVERT:
    case POSTERIZE:
    case SOLARIZE:
    case CONTRAST:
    case BRIGHTNESS:
    case SOLARIZE_ADD:
        equal_tables((enum number)operation->number, magnitude, num_pixels, new_values);
        look_up(pixels, num_pixels, new_values);
        return DONE;
    case COLOR:
        recolour(pixels, num_pixels, magnitude);
        return DONE;
    case SHARPNESS:
        memcpy(scratch->bytes, pixels, CHANNELS * num_pixels);
        sharpen(scratch->bytes, height, width, magnitude, pixels);
        return DONE;
    case ROTATE:
    case SHEAR_X:
    case SHEAR_Y:
    case TRANSLATE_X:
    case TRANSLATE_Y:
        places_of(operation, height, width, of);
        memcpy(scratch->bytes, pixels, CHANNELS * num_pixels);
        move(scratch->bytes, height, width, of, pixels);
        return DONE;
    case CUTOUT:
        cut_out(pixels, height, width, operation);
        return DONE;
    }
    return LEFT_TO_OTHERS;
}

int32_t view_operations_apply(uint8_t *pixels, int32_t height, int32_t width, const struct operation *operation)
{
    struct scratch scratch = {0};
    int result = apply_operation(pixels, height, width, operation, &scratch);
    free_scratch(&scratch);
    return result;
}
