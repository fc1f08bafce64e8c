/* A chunk of a batch: checks each sample's bytes, draws its crop, decodes it and augments the view, in one call.
 *
 * The random draws are those of shards/hashing.py, and the crops those of augment.py, to the bit:
 * tests/pipeline/data compares. What cannot be drawn or decoded here is left to that Python code, sample by sample.
 */
#include "sample_views.h"

#include <math.h>
#include <string.h>

#include "view_operations.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(PORTABLE)
#include <immintrin.h>
#define HAS_CARRYLESS __attribute__((target("pclmul,sse4.1")))
#endif

enum { NUM_TRIES = 10, NUM_DRAWS = 4 * NUM_TRIES + 1 };      /* as in augment.py */
enum { DRAWS_PER_OP = 4, NUM_OPERATIONS = 16 };              /* as in config.py and randaugment.py */
enum { LEAST_SCALED = 8 };                                   /* as in augment.py */
enum { MOST_IMAGE_SIDE = 1 << 24, MOST_RESIZED = 1 << 28 };  /* beyond it, others draw the crop */

enum crop { WHOLE, INCEPTION, RANDOM_RESIZED };
enum late_crop { NO_LATE_CROP, SQUARE, SHORT_SIDE };

#ifdef HAS_CARRYLESS
/* Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction" (Intel, 2009), with its
 * constants for the polynomial of zlib. */
HAS_CARRYLESS
static inline __m128i folded(__m128i value, __m128i constants, __m128i next)
{
    __m128i low = _mm_clmulepi64_si128(value, constants, 0x00), high = _mm_clmulepi64_si128(value, constants, 0x11);
    return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

HAS_CARRYLESS
static inline __m128i bytes_at(const uint8_t *data)
{
    return _mm_loadu_si128((const __m128i *)(const void *)data);
}

/* At least 64 bytes; all but the last num_bytes % 16 are taken. */
HAS_CARRYLESS
static uint32_t crc_of_blocks(const uint8_t *data, size_t num_bytes)
{
    const __m128i by_64 = _mm_set_epi64x(0x01c6e41596, 0x0154442bd4);
    const __m128i by_16 = _mm_set_epi64x(0x00ccaa009e, 0x01751997d0);
    const __m128i by_8 = _mm_set_epi64x(0, 0x0163cd6124), reduce = _mm_set_epi64x(0x01f7011641, 0x01db710641);
    const __m128i even = _mm_setr_epi32(-1, 0, -1, 0);
    __m128i x[4];
    for (int k = 0; k < 4; k++)
        x[k] = bytes_at(data + 16 * k);
    x[0] = _mm_xor_si128(x[0], _mm_cvtsi32_si128(-1));
    for (data += 64, num_bytes -= 64; num_bytes >= 64; data += 64, num_bytes -= 64)
        for (int k = 0; k < 4; k++)
            x[k] = folded(x[k], by_64, bytes_at(data + 16 * k));
    __m128i sum = x[0];
    for (int k = 1; k < 4; k++)
        sum = folded(sum, by_16, x[k]);
    for (; num_bytes >= 16; data += 16, num_bytes -= 16)
        sum = folded(sum, by_16, bytes_at(data));
    sum = _mm_xor_si128(_mm_srli_si128(sum, 8), _mm_clmulepi64_si128(sum, by_16, 0x10));
    sum = _mm_xor_si128(_mm_srli_si128(sum, 4), _mm_clmulepi64_si128(_mm_and_si128(sum, even), by_8, 0x00));
    __m128i rest = _mm_clmulepi64_si128(_mm_and_si128(sum, even), reduce, 0x10);
    rest = _mm_clmulepi64_si128(_mm_and_si128(rest, even), reduce, 0x00);
    return (uint32_t)_mm_extract_epi32(_mm_xor_si128(sum, rest), 1);
}
#endif

int32_t sample_views_checks_crc32(void)
{
#ifdef HAS_CARRYLESS
    return __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
#else
    return 0;
#endif
}

uint32_t sample_views_crc32(const uint8_t *data, size_t num_bytes)
{
    uint32_t crc = 0xFFFFFFFF;
#ifdef HAS_CARRYLESS
    if (num_bytes >= 64 && sample_views_checks_crc32()) {
        crc = crc_of_blocks(data, num_bytes);
        data += num_bytes / 16 * 16;
        num_bytes %= 16;
    }
#endif
    for (; num_bytes > 0; num_bytes--) {
        crc ^= *data++;
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (crc & 1 ? 0xEDB88320 : 0);
    }
    return ~crc;
}

static const uint64_t GOLDEN = 0x9E3779B97F4A7C15;

static uint64_t mixed(uint64_t z)
{
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9;
    z = (z ^ z >> 27) * 0x94D049BB133111EB;
    return z ^ z >> 31;
}

/* The uniform draws of one sample. */
struct draws {
    uint64_t base, key;
};

static struct draws draws_of(int64_t sample_id, uint64_t key)
{
    return (struct draws){mixed((uint64_t)sample_id * GOLDEN + key), mixed(key + 1)};
}

static double draw(const struct draws *draws, int number)
{
    uint64_t counter = draws->base + ((uint64_t)number + 1) * GOLDEN;
    return (double)(mixed(counter * GOLDEN + draws->key) >> 11) * 0x1p-53;
}

struct rectangle {
    int64_t top, left, height, width;
};

/* A number that Python's round and int could not take, or a side that no image has. */
static int is_side(double value)
{
    return value >= -(double)MOST_IMAGE_SIDE * 4 && value <= (double)MOST_IMAGE_SIDE * 4;
}

/* 0: none fits. -1: others must draw. */
static int inception_sides(int64_t height, int64_t width, double ratio, double share, const struct settings *settings,
                           struct rectangle *crop)
{
    double min_area = settings->min_area * (double)height * (double)width;
    double max_area = settings->max_area * (double)height * (double)width;
    double low_side = sqrt(min_area / ratio), high_side = sqrt(max_area / ratio);
    if (!is_side(low_side) || !is_side(high_side) || !is_side(rint(high_side) * ratio))
        return -1;
    int64_t low = llrint(low_side), high = llrint(high_side);
    if (llrint((double)high * ratio) > width) {
        double most = ((double)width + 0.5 - 1e-7) / ratio;
        if (!is_side(most))
            return -1;
        high = (int64_t)most;
        high -= llrint((double)high * ratio) > width;
    }
    high = high < height ? high : height;
    low = low < high ? low : high;
    int64_t h = low + (int64_t)(share * (double)(high - low + 1));
    h += (double)(llrint((double)h * ratio) * h) < min_area;
    h -= (double)(llrint((double)h * ratio) * h) > max_area;
    int64_t w = llrint((double)h * ratio);
    crop->height = h, crop->width = w;
    return 0 < h && h <= height && 0 < w && w <= width && min_area <= (double)(h * w) && (double)(h * w) <= max_area;
}

static int inception_crop(const struct draws *draws, const struct settings *settings, struct rectangle *crop)
{
    int64_t height = crop->height, width = crop->width;
    for (int entry = 0; entry < 4 * NUM_TRIES; entry += 4) {
        double ratio = settings->min_ratio + (settings->max_ratio - settings->min_ratio) * draw(draws, entry);
        struct rectangle found;
        int fits = inception_sides(height, width, ratio, draw(draws, entry + 1), settings, &found);
        if (fits < 0)
            return LEFT_TO_OTHERS;
        if (fits) {
            crop->height = found.height, crop->width = found.width;
            crop->top = (int64_t)(draw(draws, entry + 2) * (double)(height - found.height));
            crop->left = (int64_t)(draw(draws, entry + 3) * (double)(width - found.width));
            return DONE;
        }
    }
    return DONE; /* all of the image */
}

static int random_resized_crop(const struct draws *draws, const struct settings *settings, struct rectangle *crop)
{
    int64_t height = crop->height, width = crop->width;
    double low = log(settings->min_ratio), high = log(settings->max_ratio);
    for (int entry = 0; entry < 4 * NUM_TRIES; entry += 4) {
        double share = settings->min_area + (settings->max_area - settings->min_area) * draw(draws, entry);
        double area = (double)(height * width) * share, ratio = exp(low + (high - low) * draw(draws, entry + 1));
        double broad = sqrt(area * ratio), tall = sqrt(area / ratio);
        if (!is_side(broad) || !is_side(tall))
            return LEFT_TO_OTHERS;
        int64_t w = llrint(broad), h = llrint(tall);
        if (0 < w && w <= width && 0 < h && h <= height) {
            crop->top = (int64_t)(draw(draws, entry + 2) * (double)(height - h + 1));
            crop->left = (int64_t)(draw(draws, entry + 3) * (double)(width - w + 1));
            crop->height = h, crop->width = w;
            return DONE;
        }
    }
    double broad = (double)height * settings->max_ratio, tall = (double)width / settings->min_ratio;
    if (!is_side(broad) || !is_side(tall))
        return LEFT_TO_OTHERS;
    int64_t w = llrint(broad), h = llrint(tall);
    w = w < 1 ? 1 : w, h = h < 1 ? 1 : h;
    w = w < width ? w : width, h = h < height ? h : height;
    *crop = (struct rectangle){(height - h) / 2, (width - w) / 2, h, w};
    return DONE;
}

static int64_t scaled_side(int64_t side, float factor, int64_t least)
{
    int64_t scaled = llrintf((float)side * factor);
    return scaled < least ? least : scaled;
}

/* The window on the resized crop. */
static int aim(const struct draws *draws, const struct settings *settings, const struct rectangle *crop,
               struct target *target)
{
    int64_t height = settings->size, width = settings->size, size = settings->size;
    if (settings->late_crop != NO_LATE_CROP)
        height = width = settings->resize_pixels;
    if (settings->late_crop == SHORT_SIDE) {
        int64_t least = crop->height < crop->width ? crop->height : crop->width;
        float factor = (float)settings->resize_pixels / (float)least;
        if ((float)crop->height * factor > (float)MOST_RESIZED || (float)crop->width * factor > (float)MOST_RESIZED)
            return LEFT_TO_OTHERS;
        height = scaled_side(crop->height, factor, settings->resize_pixels);
        width = scaled_side(crop->width, factor, settings->resize_pixels);
    }
    if (height < size || width < size)
        return LEFT_TO_OTHERS;
    *target = (struct target){(int32_t)height,
                              (int32_t)width,
                              (int32_t)(draw(draws, 2) * (double)(height - size + 1)),
                              (int32_t)(draw(draws, 3) * (double)(width - size + 1)),
                              (int32_t)size,
                              (int32_t)size,
                              settings->flip && draw(draws, NUM_DRAWS - 1) < 0.5};
    return DONE;
}

static void scale(struct rectangle *box, int64_t height, int64_t width, int64_t denominator)
{
    int64_t half = denominator / 2;
    int64_t top = (box->top + half) / denominator, left = (box->left + half) / denominator;
    int64_t bottom = (box->top + box->height + half) / denominator;
    int64_t right = (box->left + box->width + half) / denominator;
    height = (height + denominator - 1) / denominator, width = (width + denominator - 1) / denominator;
    bottom = bottom < height ? bottom : height, right = right < width ? right : width;
    *box = (struct rectangle){top, left, bottom - top, right - left};
}

static int plan_view(const struct sample *sample, const struct settings *settings, struct request *request)
{
    int orientation = settings->exif ? sample->orientation : 1;
    if (orientation < 1 || orientation > 8 || sample->height < 1 || sample->height > MOST_IMAGE_SIDE || sample->width < 1 ||
        sample->width > MOST_IMAGE_SIDE)
        return LEFT_TO_OTHERS;
    int is_exchanged = orientation >= 5;
    int is_upside_down = orientation == 3 || orientation == 4 || orientation == 7 || orientation == 8;
    int is_leftright = orientation == 2 || orientation == 3 || orientation == 6 || orientation == 7;
    int64_t height = is_exchanged ? sample->width : sample->height, width = is_exchanged ? sample->height : sample->width;
    struct rectangle crop = {0, 0, height, width};
    struct draws draws = draws_of(sample->sample_id, sample->crop_key);
    if (settings->crop == INCEPTION && !inception_crop(&draws, settings, &crop))
        return LEFT_TO_OTHERS;
    if (settings->crop == RANDOM_RESIZED && !random_resized_crop(&draws, settings, &crop))
        return LEFT_TO_OTHERS;
    if (!aim(&draws, settings, &crop, &request->target))
        return LEFT_TO_OTHERS;
    int64_t denominator = 1, tall = request->target.resized_height, broad = request->target.resized_width;
    if (settings->scaled_decode && tall >= LEAST_SCALED && broad >= LEAST_SCALED)
        for (denominator = 8; denominator > 1; denominator /= 2)
            if (crop.height >= denominator * tall && crop.width >= denominator * broad)
                break;
    if (is_upside_down)
        crop.top = height - crop.top - crop.height;
    if (is_leftright)
        crop.left = width - crop.left - crop.width;
    if (is_exchanged)
        crop = (struct rectangle){crop.left, crop.top, crop.width, crop.height};
    if (denominator > 1)
        scale(&crop, sample->height, sample->width, denominator);
    request->stored_height = sample->height;
    request->stored_width = sample->width;
    request->denominator = (int32_t)denominator;
    request->top = (int32_t)crop.top;
    request->left = (int32_t)crop.left;
    request->height = (int32_t)crop.height;
    request->width = (int32_t)crop.width;
    request->is_exchanged = is_exchanged;
    request->is_upside_down = is_upside_down;
    request->is_leftright = is_leftright;
    request->is_antialiased = settings->is_antialiased;
    request->leaves_huffman = settings->leaves_huffman;
    return DONE;
}

static int augment(const struct sample *sample, const struct settings *settings, struct scratch *scratch, uint8_t *out)
{
    struct draws draws = draws_of(sample->sample_id, sample->operation_key);
    for (int number = 0; number < settings->num_ops; number++) {
        int first = DRAWS_PER_OP * number;
        struct operation operation = {(int32_t)(draw(&draws, first) * NUM_OPERATIONS), settings->magnitude,
                                      draw(&draws, first + 1) >= 0.5 ? 1 : -1, draw(&draws, first + 2),
                                      draw(&draws, first + 3)};
        if (!apply_operation(out, settings->size, settings->size, &operation, scratch))
            return LEFT_TO_OTHERS;
    }
    return DONE;
}

static int fill_view(const struct sample *sample, const struct settings *settings, struct scratch *scratch, uint8_t *out)
{
    static const uint8_t JPEG[3] = {0xFF, 0xD8, 0xFF};
    struct request request;
    if (!sample->data || sample->num_bytes < sizeof JPEG || memcmp(sample->data, JPEG, sizeof JPEG) != 0)
        return LEFT_TO_OTHERS;
    if (sample_views_checks_crc32() && sample_views_crc32(sample->data, (size_t)sample->num_bytes) != sample->crc32)
        return LEFT_TO_OTHERS;
    return plan_view(sample, settings, &request) &&
           decode_view(sample->data, (size_t)sample->num_bytes, &request, scratch, out) &&
           augment(sample, settings, scratch, out);
}

int32_t sample_views_plan(const struct sample *sample, const struct settings *settings, struct request *request)
{
    return plan_view(sample, settings, request);
}

void sample_views_fill(const struct sample *samples, int32_t count, const struct settings *settings, uint8_t *views,
                       uint8_t *are_done)
{
    struct scratch scratch = {0};
    size_t view_bytes = 3 * (size_t)settings->size * (size_t)settings->size;
    for (int32_t i = 0; i < count; i++)
        are_done[i] = (uint8_t)fill_view(samples + i, settings, &scratch, views + view_bytes * (size_t)i);
    free_scratch(&scratch);
}
