/* libFuzzer's target for the C files of pipeline/data: tests/fuzz/crop_decoder.py builds and runs it.
 *
 * An input is NUM_PLAN_BYTES that say what is asked for, then a JPEG. A view of a crop must have the pixels of a full
 * decode by the same libjpeg-turbo, and leave nothing unwritten.
 */
#include <stddef.h>
#include <stdio.h>

#include <jpeglib.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "sample_views.h"
#include "view_operations.h"

#if defined(__has_feature)
#if __has_feature(memory_sanitizer)
#include <sanitizer/msan_interface.h>
#define REFUSE_UNWRITTEN(bytes, count) __msan_check_mem_is_initialized(bytes, count)
#endif
#endif
#ifndef REFUSE_UNWRITTEN
#define REFUSE_UNWRITTEN(bytes, count) ((void)(bytes), (void)(count))
#endif

enum { NUM_PLAN_BYTES = 64, MOST_TRIED_SIDE = 40, MOST_TRIED_PIXELS = 1 << 18, NUM_SAMPLES = 2 };

size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t most);

struct plan {
    const uint8_t *bytes;
    int next;
};

static uint32_t chosen(struct plan *plan, uint32_t count)
{
    const uint8_t *at = plan->bytes + plan->next;
    plan->next += 2;
    return count ? (uint32_t)(at[0] << 8 | at[1]) % count : 0;
}

struct failure {
    struct jpeg_error_mgr errors;
    jmp_buf leave;
};

static void leave(j_common_ptr jpeg)
{
    longjmp(((struct failure *)jpeg->err)->leave, 1);
}

static void say_nothing(j_common_ptr jpeg, int level)
{
    (void)jpeg, (void)level;
}

/* The whole image as RGB at 1 / denominator; NULL if it has none, or too many pixels. Sets the stored size, which is 0
 * if there is none. Damage is not refused. */
static uint8_t *decode_all(const uint8_t *data, size_t size, int denominator, int32_t stored[2], int32_t decoded[2])
{
    struct jpeg_decompress_struct jpeg;
    struct failure failure;
    uint8_t *volatile pixels = NULL;
    memset(&jpeg, 0, sizeof jpeg);
    stored[0] = stored[1] = 0;
    jpeg.err = jpeg_std_error(&failure.errors);
    failure.errors.error_exit = leave;
    failure.errors.emit_message = say_nothing;
    if (setjmp(failure.leave) == 0) {
        jpeg_create_decompress(&jpeg);
        jpeg_mem_src(&jpeg, data, size);
        jpeg_read_header(&jpeg, TRUE);
        stored[0] = (int32_t)jpeg.image_height, stored[1] = (int32_t)jpeg.image_width;
        if ((uint64_t)jpeg.image_height * jpeg.image_width <= MOST_TRIED_PIXELS) {
            jpeg.out_color_space = JCS_RGB;
            jpeg.scale_num = 1, jpeg.scale_denom = (unsigned)denominator;
            jpeg.dct_method = JDCT_ISLOW;
            jpeg_start_decompress(&jpeg);
            decoded[0] = (int32_t)jpeg.output_height, decoded[1] = (int32_t)jpeg.output_width;
            size_t row_bytes = 3 * (size_t)jpeg.output_width;
            pixels = calloc(row_bytes * jpeg.output_height + 16, 1);
            while (jpeg.output_scanline < jpeg.output_height) {
                JSAMPROW row = pixels + row_bytes * jpeg.output_scanline;
                jpeg_read_scanlines(&jpeg, &row, 1);
            }
        }
    } else {
        free(pixels);
        pixels = NULL;
    }
    jpeg_destroy_decompress(&jpeg);
    return pixels;
}

static void try_view(struct plan *plan, const uint8_t *data, size_t size)
{
    int32_t stored[2], decoded[2] = {0, 0}, denominator = 1 << chosen(plan, 4);
    uint8_t *all = decode_all(data, size, denominator, stored, decoded);
    if ((uint64_t)stored[0] * (uint64_t)stored[1] > MOST_TRIED_PIXELS || stored[0] == 0)
        return;
    struct request request = {0};
    int32_t tall = (stored[0] + denominator - 1) / denominator, broad = (stored[1] + denominator - 1) / denominator;
    request.stored_height = stored[0], request.stored_width = stored[1], request.denominator = denominator;
    request.top = (int32_t)chosen(plan, (uint32_t)tall), request.left = (int32_t)chosen(plan, (uint32_t)broad);
    request.height = 1 + (int32_t)chosen(plan, (uint32_t)(tall - request.top));
    request.width = 1 + (int32_t)chosen(plan, (uint32_t)(broad - request.left));
    if (chosen(plan, 32) == 0) /* a plan that does not fit */
        request.left += broad;
    request.is_exchanged = (int32_t)chosen(plan, 2), request.is_upside_down = (int32_t)chosen(plan, 2);
    request.is_leftright = (int32_t)chosen(plan, 2), request.is_antialiased = (int32_t)chosen(plan, 2);
    request.leaves_huffman = (int32_t)chosen(plan, 2);
    struct target *target = &request.target;
    target->height = 1 + (int32_t)chosen(plan, MOST_TRIED_SIDE), target->width = 1 + (int32_t)chosen(plan, MOST_TRIED_SIDE);
    target->resized_height = target->height + (int32_t)chosen(plan, 300);
    target->resized_width = target->width + (int32_t)chosen(plan, 300);
    target->top = (int32_t)chosen(plan, (uint32_t)(target->resized_height - target->height + 1));
    target->left = (int32_t)chosen(plan, (uint32_t)(target->resized_width - target->width + 1));
    target->is_mirrored = (int32_t)chosen(plan, 2);
    if (chosen(plan, 4) == 0) { /* the crop itself */
        target->resized_height = target->height = request.is_exchanged ? request.width : request.height;
        target->resized_width = target->width = request.is_exchanged ? request.height : request.width;
        target->top = target->left = 0;
    }
    size_t view_bytes = 3 * (size_t)target->height * (size_t)target->width;
    uint8_t *views = malloc(2 * view_bytes);
    if (crop_decoder_view(data, size, &request, views) == DONE) {
        REFUSE_UNWRITTEN(views, view_bytes);
        if (request.left + request.width > broad)
            abort(); /* it does not fit */
        if (all) {
            struct pixels source = {all + 3 * ((ptrdiff_t)request.top * decoded[1] + request.left), 3 * decoded[1], 3,
                                    request.height, request.width};
            if (request.is_exchanged)
                source = (struct pixels){source.first, 3, source.row_step, request.width, request.height};
            if (request.is_upside_down) {
                source.first += (source.height - 1) * source.row_step;
                source.row_step = -source.row_step;
            }
            if (request.is_leftright) {
                source.first += (source.width - 1) * source.column_step;
                source.column_step = -source.column_step;
            }
            uint8_t *expected = views + view_bytes;
            if (!(request.is_antialiased ? resize_antialiased : resize_plain)(&source, target, expected) ||
                memcmp(views, expected, view_bytes) != 0)
                abort(); /* other pixels than those of a full decode */
        }
    }
    free(views);
    free(all);
}

static void try_samples(struct plan *plan, const uint8_t *data, size_t size)
{
    static const double AREAS[] = {1e-6, 0.05, 0.5, 1.0}, RATIOS[] = {0.01, 0.75, 1.0, 4.0 / 3, 100.0};
    int32_t stored[2], decoded[2];
    free(decode_all(data, size, 8, stored, decoded));
    if ((uint64_t)stored[0] * (uint64_t)stored[1] > MOST_TRIED_PIXELS)
        return;
    struct settings settings = {0};
    uint32_t least = chosen(plan, 4), narrow = chosen(plan, 5);
    settings.min_area = AREAS[least], settings.max_area = AREAS[least + chosen(plan, 4 - least)];
    settings.min_ratio = RATIOS[narrow], settings.max_ratio = RATIOS[narrow + chosen(plan, 5 - narrow)];
    settings.crop = (int32_t)chosen(plan, 3);
    settings.late_crop = settings.crop ? 0 : (int32_t)chosen(plan, 3);
    settings.size = 1 + (int32_t)chosen(plan, MOST_TRIED_SIDE);
    settings.resize_pixels = settings.size + (int32_t)chosen(plan, 40);
    settings.flip = (int32_t)chosen(plan, 2), settings.is_antialiased = (int32_t)chosen(plan, 2);
    settings.scaled_decode = (int32_t)chosen(plan, 2), settings.exif = (int32_t)chosen(plan, 2);
    settings.num_ops = (int32_t)chosen(plan, 3), settings.magnitude = (int32_t)chosen(plan, 21);
    settings.leaves_huffman = (int32_t)chosen(plan, 2);
    struct sample samples[NUM_SAMPLES] = {{0}, {0}};
    for (int i = 0; i < NUM_SAMPLES; i++) {
        samples[i].data = data, samples[i].num_bytes = i == 0 ? size : size - size / 3;
        samples[i].sample_id = (int64_t)chosen(plan, 1000);
        samples[i].crop_key = chosen(plan, 1000), samples[i].operation_key = chosen(plan, 1000);
        samples[i].crc32 = sample_views_crc32(data, (size_t)samples[i].num_bytes);
        samples[i].height = stored[0], samples[i].width = stored[1];
        samples[i].orientation = (int32_t)chosen(plan, 10);
    }
    size_t view_bytes = 3 * (size_t)settings.size * (size_t)settings.size;
    uint8_t *views = malloc(NUM_SAMPLES * view_bytes), are_done[NUM_SAMPLES];
    sample_views_fill(samples, NUM_SAMPLES, &settings, views, are_done);
    for (int i = 0; i < NUM_SAMPLES; i++)
        if (are_done[i])
            REFUSE_UNWRITTEN(views + view_bytes * (size_t)i, view_bytes);
    free(views);
}

static void try_operation(struct plan *plan, const uint8_t *data, size_t size)
{
    int32_t height = 1 + (int32_t)chosen(plan, MOST_TRIED_SIDE), width = 1 + (int32_t)chosen(plan, MOST_TRIED_SIDE);
    size_t num_bytes = 3 * (size_t)height * (size_t)width;
    uint8_t *pixels = malloc(num_bytes);
    for (size_t i = 0; i < num_bytes; i++)
        pixels[i] = size ? data[i % size] : (uint8_t)i;
    struct operation operation = {(int32_t)chosen(plan, 18) - 1, (int32_t)chosen(plan, 21), chosen(plan, 2) ? 1 : -1,
                                  chosen(plan, 1000) / 1000.0, chosen(plan, 1000) / 1000.0};
    view_operations_apply(pixels, height, width, &operation);
    REFUSE_UNWRITTEN(pixels, num_bytes);
    free(pixels);
}

int LLVMFuzzerTestOneInput(const uint8_t *input, size_t size)
{
    if (size < NUM_PLAN_BYTES)
        return 0;
    struct plan plan = {input, 0};
    const uint8_t *data = input + NUM_PLAN_BYTES;
    uint32_t what = chosen(&plan, 16);
    (what == 0 ? try_operation : what <= 3 ? try_samples : try_view)(&plan, data, size - NUM_PLAN_BYTES);
    return 0;
}

/* Other plans for the same JPEG, other samplings, or libFuzzer's own changes of the JPEG. */
size_t LLVMFuzzerCustomMutator(uint8_t *input, size_t size, size_t most, unsigned seed)
{
    if (size <= NUM_PLAN_BYTES || most <= NUM_PLAN_BYTES)
        return LLVMFuzzerMutate(input, size, most);
    srand(seed);
    if (rand() % 2)
        for (int i = 1 + rand() % 8; i > 0; i--)
            input[rand() % NUM_PLAN_BYTES] = (uint8_t)rand();
    uint8_t *data = input + NUM_PLAN_BYTES;
    size_t num_bytes = size - NUM_PLAN_BYTES;
    if (rand() % 8 == 0)
        for (size_t i = 0; i + 19 < num_bytes; i++)
            if (data[i] == 0xFF && data[i + 1] >= 0xC0 && data[i + 1] <= 0xC2) {
                size_t place = i + 11 + 3 * (size_t)(rand() % 3);
                data[place] = (uint8_t)((1 + rand() % 4) << 4 | (1 + rand() % 4));
                break;
            }
    if (rand() % 3 == 0)
        num_bytes = LLVMFuzzerMutate(data, num_bytes, most - NUM_PLAN_BYTES);
    return NUM_PLAN_BYTES + num_bytes;
}
