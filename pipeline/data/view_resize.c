/* Two bilinear resizes, with half-pixel centres.
 *
 * resize_plain gives OpenCV's pixels (INTER_LINEAR on 8 bits): weights of 11 bits, rows first resized to 15 bits.
 * resize_antialiased gives Pillow's (Image.resize with BILINEAR): weights of 22 bits over all that an output pixel
 * covers, columns first, then rows, rounded to 8 bits in between. Both to the bit; tests/pipeline/data compares.
 */
#include "view_resize.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* With PORTABLE, no vector instructions are named: MemorySanitizer does not follow all of them (tests/fuzz). */
#if defined(__SSE2__) && !defined(PORTABLE)
#define WITH_SSE2
#include <immintrin.h>
#endif
#if defined(__x86_64__) && defined(__GNUC__) && !defined(PORTABLE)
#define WITH_AVX2 __attribute__((target("avx2")))
#endif

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_EACH_PROCESSOR __attribute__((target_clones("avx2", "default")))
#else
#define FOR_EACH_PROCESSOR
#endif

enum { PLAIN_BITS = 11, COVER_BITS = 22 };

/* Of every output place along one axis: the two source places and their weights. */
struct pair {
    int32_t low, high;
    int16_t low_weight, high_weight;
};

static void fill_pairs(struct pair *pairs, int first, int count, int from, int to, int are_rows)
{
    double scale = 1.0 / ((double)to / from);
    for (int i = 0; i < count; i++) {
        float place = (float)((first + i + 0.5) * scale - 0.5);
        int low = (int)floorf(place);
        float share = place - (float)low;
        int high = low + 1;
        /* OpenCV gives columns at the border all the weight, and repeats rows: another rounding. */
        if (!are_rows && low < 0)
            share = 0;
        if (!are_rows && low >= from - 1)
            share = 0;
        pairs[i].low = low < 0 ? 0 : low > from - 1 ? from - 1 : low;
        pairs[i].high = high < 0 ? 0 : high > from - 1 ? from - 1 : high;
        pairs[i].low_weight = (int16_t)lrintf((1.0f - share) * (1 << PLAIN_BITS));
        pairs[i].high_weight = (int16_t)lrintf(share * (1 << PLAIN_BITS));
    }
}

/* Reads one byte beyond a pixel and writes one number beyond `resized`: both have room for it. */
static void resize_row(const uint8_t *row, const struct pair *columns, int width, int16_t *resized)
{
#ifdef WITH_SSE2
    const __m128i zero = _mm_setzero_si128();
    for (int i = 0; i < width; i++) {
        int32_t low, high, weights;
        memcpy(&low, row + columns[i].low, 4);
        memcpy(&high, row + columns[i].high, 4);
        memcpy(&weights, &columns[i].low_weight, 4);
        __m128i bytes = _mm_unpacklo_epi8(_mm_cvtsi32_si128(low), _mm_cvtsi32_si128(high));
        __m128i sums = _mm_madd_epi16(_mm_unpacklo_epi8(bytes, zero), _mm_set1_epi32(weights));
        sums = _mm_srai_epi32(sums, 4);
        _mm_storel_epi64((__m128i *)(void *)(resized + 3 * i), _mm_packs_epi32(sums, sums));
    }
#else
    for (int i = 0; i < width; i++) {
        const uint8_t *low = row + columns[i].low, *high = row + columns[i].high;
        int a = columns[i].low_weight, b = columns[i].high_weight;
        resized[3 * i] = (int16_t)((low[0] * a + high[0] * b) >> 4);
        resized[3 * i + 1] = (int16_t)((low[1] * a + high[1] * b) >> 4);
        resized[3 * i + 2] = (int16_t)((low[2] * a + high[2] * b) >> 4);
    }
#endif
}

FOR_EACH_PROCESSOR
static void blend_rows(const int16_t *low, const int16_t *high, int16_t a, int16_t b, int count, uint8_t *out)
{
    for (int i = 0; i < count; i++)
        out[i] = (uint8_t)((((low[i] * a) >> 16) + ((high[i] * b) >> 16) + 2) >> 2);
}

int resize_plain(const struct pixels *source, const struct target *target, uint8_t *out)
{
    int width = target->width, height = target->height, count = 3 * width;
    struct pair *columns = malloc(sizeof(struct pair) * ((size_t)width + height));
    int16_t *lines = malloc(sizeof(int16_t) * 2 * ((size_t)count + 1));
    if (!columns || !lines) {
        free(columns);
        free(lines);
        return 0;
    }
    struct pair *rows = columns + width;
    fill_pairs(columns, target->left, width, source->width, target->resized_width, 0);
    fill_pairs(rows, target->top, height, source->height, target->resized_height, 1);
    for (int i = 0; i < width; i++) { /* from columns to bytes */
        columns[i].low *= (int32_t)source->column_step;
        columns[i].high *= (int32_t)source->column_step;
    }
    if (target->is_mirrored)
        for (int i = 0; i < width / 2; i++) {
            struct pair kept = columns[i];
            columns[i] = columns[width - 1 - i];
            columns[width - 1 - i] = kept;
        }
    int16_t *line[2] = {lines, lines + count + 1};
    int held[2] = {-1, -1};
    for (int y = 0; y < height; y++) {
        int wanted[2] = {rows[y].low, rows[y].high};
        if (wanted[0] == held[1] && held[0] != held[1]) { /* the last row's high one is this one's low one */
            int16_t *other = line[0];
            line[0] = line[1], line[1] = other;
            held[1] = held[0], held[0] = wanted[0];
        }
        for (int k = 0; k < 2; k++)
            if (held[k] != wanted[k]) {
                if (k == 1 && wanted[1] == wanted[0])
                    continue;
                resize_row(source->first + wanted[k] * source->row_step, columns, width, line[k]);
                held[k] = wanted[k];
            }
        const int16_t *high = wanted[1] == wanted[0] ? line[0] : line[1];
        blend_rows(line[0], high, rows[y].low_weight, rows[y].high_weight, count, out + (size_t)y * count);
    }
    free(columns);
    free(lines);
    return 1;
}

/* Of every output place along one axis: the first source place it covers, how many, and their weights, two by two. A
 * weight of 22 bits is kept as two halves of 11, so that 16-bit products do. */
struct pair_of_weights {
    int16_t high[2], low[2];
};

struct covers {
    int most; /* pairs a place */
    int32_t *first, *count;
    struct pair_of_weights *pairs; /* pairs[place * most + i] */
};

enum { HALF_BITS = COVER_BITS / 2 };

static int fill_covers(struct covers *covers, int first, int count, int from, int to)
{
    double scale = (double)from / to, filter = scale < 1.0 ? 1.0 : scale, inverse = 1.0 / filter;
    int most = (int)ceil(filter) * 2 + 1;
    covers->most = (most + 1) / 2;
    covers->first = malloc(2 * sizeof(int32_t) * (size_t)count);
    covers->pairs = calloc((size_t)covers->most * (size_t)count, sizeof(struct pair_of_weights));
    double *shares = malloc(sizeof(double) * (size_t)most);
    if (!covers->first || !covers->pairs || !shares) {
        free(shares);
        return 0;
    }
    covers->count = covers->first + count;
    for (int i = 0; i < count; i++) {
        double centre = (first + i + 0.5) * scale, sum = 0.0;
        int begin = (int)(centre - filter + 0.5), end = (int)(centre + filter + 0.5);
        begin = begin < 0 ? 0 : begin;
        end = end > from ? from : end;
        for (int k = 0; k < end - begin; k++) {
            double distance = fabs((k + begin - centre + 0.5) * inverse);
            shares[k] = distance < 1.0 ? 1.0 - distance : 0.0;
            sum += shares[k];
        }
        covers->first[i] = begin;
        covers->count[i] = end - begin;
        for (int k = 0; k < end - begin; k++) {
            int32_t weight = (int32_t)(0.5 + (sum != 0.0 ? shares[k] / sum : shares[k]) * (1 << COVER_BITS));
            struct pair_of_weights *pair = covers->pairs + (size_t)i * covers->most + k / 2;
            pair->high[k % 2] = (int16_t)(weight >> HALF_BITS);
            pair->low[k % 2] = (int16_t)(weight & ((1 << HALF_BITS) - 1));
        }
    }
    free(shares);
    return 1;
}

static void free_covers(struct covers *covers)
{
    free(covers->first);
    free(covers->pairs);
}

static uint8_t summed(const uint8_t *first, ptrdiff_t step, int count, const struct pair_of_weights *pairs)
{
    int32_t high = 0, low = 1 << (COVER_BITS - 1);
    for (int k = 0; k < count; k++, first += step) {
        high += pairs[k / 2].high[k % 2] * *first;
        low += pairs[k / 2].low[k % 2] * *first;
    }
    int32_t sum = ((high << HALF_BITS) + low) >> COVER_BITS;
    return (uint8_t)(sum > 255 ? 255 : sum);
}

static void cover_row(const uint8_t *row, ptrdiff_t step, const struct covers *covers, int width, int is_mirrored,
                      uint8_t *resized)
{
    for (int i = 0; i < width; i++, resized += 3) {
        int place = is_mirrored ? width - 1 - i : i;
        const struct pair_of_weights *pairs = covers->pairs + (size_t)place * covers->most;
        const uint8_t *pixel = row + covers->first[place] * step;
        for (int channel = 0; channel < 3; channel++)
            resized[channel] = summed(pixel + channel, step, covers->count[place], pairs);
    }
}

#ifdef WITH_AVX2
struct sums {
    __m256i high, low;
};

/* Adds the products of numbers of 16 bits, first and second of a pair in turn, with the pair's weights. */
WITH_AVX2 static inline void add_products(struct sums *sums, __m256i numbers, const struct pair_of_weights *pair)
{
    int32_t weights[2];
    memcpy(weights, pair, sizeof weights);
    sums->high = _mm256_add_epi32(sums->high, _mm256_madd_epi16(numbers, _mm256_set1_epi32(weights[0])));
    sums->low = _mm256_add_epi32(sums->low, _mm256_madd_epi16(numbers, _mm256_set1_epi32(weights[1])));
}

WITH_AVX2 static inline __m256i rounded(struct sums sums)
{
    __m256i sum = _mm256_add_epi32(_mm256_slli_epi32(sums.high, HALF_BITS), sums.low);
    return _mm256_srai_epi32(_mm256_add_epi32(sum, _mm256_set1_epi32(1 << (COVER_BITS - 1))), COVER_BITS);
}

WITH_AVX2 static inline __m128i bytes_from(const uint8_t *first)
{
    return _mm_loadu_si128((const __m128i *)(const void *)first);
}

/* Up to four pixels, `count` of them; each takes 4 bytes, but for a step of 3, where they lie side by side. */
WITH_AVX2 static inline __m128i four_pixels(const uint8_t *first, ptrdiff_t step, int count)
{
    if (step == 3)
        return bytes_from(first);
    int32_t pixels[4];
    for (int k = 0; k < 4; k++)
        memcpy(pixels + k, first + (k < count ? k : 0) * step, 4);
    return _mm_setr_epi32(pixels[0], pixels[1], pixels[2], pixels[3]);
}

/* Two of four pixels, from number `first` on, in turn: the bytes that become 16 bits a channel. */
WITH_AVX2 static inline __m256i two_of_four(char first, char pixel_bytes)
{
    char a = (char)(first * pixel_bytes), b = (char)(a + pixel_bytes);
    return _mm256_broadcastsi128_si256(_mm_setr_epi8(a, -1, b, -1, (char)(a + 1), -1, (char)(b + 1), -1, (char)(a + 2),
                                                     -1, (char)(b + 2), -1, -1, -1, -1, -1));
}

/* cover_row of two rows. Reads up to 16 bytes from a pixel on: behind the last row there is room for it. */
WITH_AVX2 static void cover_two_rows(const uint8_t *const rows[2], ptrdiff_t step, const struct covers *covers,
                                     int width, int is_mirrored, uint8_t *const resized[2])
{
    char pixel_bytes = step == 3 ? 3 : 4;
    const __m256i two[2] = {two_of_four(0, pixel_bytes), two_of_four(2, pixel_bytes)};
    for (int i = 0; i < width; i++) {
        int place = is_mirrored ? width - 1 - i : i, count = covers->count[place];
        const struct pair_of_weights *pairs = covers->pairs + (size_t)place * covers->most;
        ptrdiff_t offset = step * covers->first[place];
        struct sums sums = {_mm256_setzero_si256(), _mm256_setzero_si256()};
        for (int k = 0; k < count; k += 4, offset += 4 * step) {
            __m256i pixels = _mm256_castsi128_si256(four_pixels(rows[0] + offset, step, count - k));
            pixels = _mm256_inserti128_si256(pixels, four_pixels(rows[1] + offset, step, count - k), 1);
            add_products(&sums, _mm256_shuffle_epi8(pixels, two[0]), pairs + k / 2);
            if (k + 2 < count) /* of an odd last one the partner weighs nothing */
                add_products(&sums, _mm256_shuffle_epi8(pixels, two[1]), pairs + k / 2 + 1);
        }
        __m256i packed = _mm256_packs_epi32(rounded(sums), _mm256_setzero_si256());
        packed = _mm256_packus_epi16(packed, packed);
        int32_t pixels[2] = {_mm256_extract_epi32(packed, 0), _mm256_extract_epi32(packed, 4)};
        for (int k = 0; k < 2; k++)
            if (i + 1 < width)
                memcpy(resized[k] + 3 * i, pixels + k, 4); /* the fourth byte is written again */
            else
                memcpy(resized[k] + 3 * i, pixels + k, 3);
    }
}

/* As much of cover_column as fills whole registers. Returns how many bytes. */
WITH_AVX2 static size_t cover_columns(const uint8_t *rows, size_t row_bytes, int count,
                                      const struct pair_of_weights *pairs, uint8_t *out)
{
    size_t i = 0;
    for (; i + 16 <= row_bytes; i += 16) {
        const uint8_t *row = rows + i;
        struct sums first = {_mm256_setzero_si256(), _mm256_setzero_si256()}, last = first;
        for (int k = 0; k < count; k += 2, row += 2 * row_bytes) {
            __m128i here = bytes_from(row), below = bytes_from(k + 1 < count ? row + row_bytes : row);
            add_products(&first, _mm256_cvtepu8_epi16(_mm_unpacklo_epi8(here, below)), pairs + k / 2);
            add_products(&last, _mm256_cvtepu8_epi16(_mm_unpackhi_epi8(here, below)), pairs + k / 2);
        }
        __m256i words = _mm256_packs_epi32(rounded(first), rounded(last)); /* 0-3, 8-11 and 4-7, 12-15 */
        words = _mm256_permute4x64_epi64(words, 0xD8);
        __m128i packed = _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
        _mm_storeu_si128((__m128i *)(void *)(out + i), packed);
    }
    return i;
}
#endif

static void cover_rows(const struct pixels *source, int begin, int end, const struct covers *covers, int width,
                       int is_mirrored, uint8_t *lines)
{
    const uint8_t *row = source->first + begin * source->row_step;
    ptrdiff_t line_bytes = 3 * (ptrdiff_t)width;
    int y = begin;
#ifdef WITH_AVX2
    if (__builtin_cpu_supports("avx2"))
        for (; y + 2 <= end; y += 2, row += 2 * source->row_step, lines += 2 * line_bytes) {
            const uint8_t *const both[2] = {row, row + source->row_step};
            uint8_t *const resized[2] = {lines, lines + line_bytes};
            cover_two_rows(both, source->column_step, covers, width, is_mirrored, resized);
        }
#endif
    for (; y < end; y++, row += source->row_step, lines += line_bytes)
        cover_row(row, source->column_step, covers, width, is_mirrored, lines);
}

static void cover_column(const uint8_t *rows, size_t row_bytes, int count, const struct pair_of_weights *pairs,
                         uint8_t *out)
{
    size_t i = 0;
#ifdef WITH_AVX2
    if (__builtin_cpu_supports("avx2"))
        i = cover_columns(rows, row_bytes, count, pairs, out);
#endif
    for (; i < row_bytes; i++)
        out[i] = summed(rows + i, (ptrdiff_t)row_bytes, count, pairs);
}

int resize_antialiased(const struct pixels *source, const struct target *target, uint8_t *out)
{
    struct covers columns = {0}, rows = {0};
    int width = target->width, height = target->height, is_done = 0;
    size_t row_bytes = 3 * (size_t)width;
    if (fill_covers(&columns, target->left, width, source->width, target->resized_width) &&
        fill_covers(&rows, target->top, height, source->height, target->resized_height)) {
        int begin = rows.first[0], end = rows.first[height - 1] + rows.count[height - 1];
        uint8_t *lines = malloc(row_bytes * (size_t)(end - begin));
        if (lines) {
            cover_rows(source, begin, end, &columns, width, target->is_mirrored, lines);
            for (int y = 0; y < height; y++)
                cover_column(lines + row_bytes * (size_t)(rows.first[y] - begin), row_bytes, rows.count[y],
                             rows.pairs + (size_t)y * rows.most, out + row_bytes * (size_t)y);
            is_done = 1;
        }
        free(lines);
    }
    free_covers(&columns);
    free_covers(&rows);
    return is_done;
}
