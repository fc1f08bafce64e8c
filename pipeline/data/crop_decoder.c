/* JPEG bytes -> the resized crop, decoding only the rows and columns that the crop needs.
 *
 * The pixels are those of a full decode by libjpeg-turbo (accurate DCT, smooth upsampling) that is then cropped, turned,
 * resized and mirrored. Whatever is wrong with the data, be it only a warning, is left to the caller's other decoder, and
 * so is every rarity. Below the crop nothing is decoded: there it is only made sure that the data continues to the end of
 * the image, with no marker on the way at which a decoder would give up. What could still be found there are warnings
 * about rows that this view does not show.
 */
#include <stddef.h>
#include <stdio.h>

#include <jpeglib.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "crop_decoder.h"
#include "huffman_decoder.h"

#if !defined(LIBJPEG_TURBO_VERSION_NUMBER) || LIBJPEG_TURBO_VERSION_NUMBER < 2001000
#error "libjpeg-turbo 2.1 or newer is needed"
#endif
#ifndef CROP_DECODER_SOURCES
#error "hatch_build.py builds this: it says which sources the library is made of"
#endif
#define TEXT_OF(x) #x
#define TEXT(x) TEXT_OF(x)

enum { MOST_PIXELS = 178956970 }; /* as in decode.py, before anything is allocated */
enum { MOST_SCANS = 100, MOST_SEGMENTS = 1 << 16, EXIF_SEGMENTS = 1024 }; /* as in shards/images: ImageLimits' defaults */
static const uint64_t MOST_SCAN_PIXELS = (uint64_t)1 << 31, MOST_MEMORY_BYTES = (uint64_t)1 << 30;
enum { LEAST_BYTES = 4096 }; /* for less, filling huffman_decoder.c's tables takes longer than decoding saves */
enum { READ_BEYOND = 16 }; /* bytes that resizing reads from a pixel on */
enum { MARGIN = 2 }; /* columns beside the crop that smooth upsampling looks at */

/* The first two members of libjpeg's structure, in its jpegint.h, which is not installed everywhere. They are the same
 * in libjpeg-turbo 2.1 to 3.1; with a newer one, crop_decoder.py sets leaves_huffman. */
struct jpeg_entropy_decoder {
    void (*start_pass)(j_decompress_ptr jpeg);
    boolean (*decode_mcu)(j_decompress_ptr jpeg, JBLOCKROW *blocks);
};

struct decoding {
    struct jpeg_decompress_struct jpeg;
    struct jpeg_error_mgr errors;
    jmp_buf leave;
    const uint8_t *data;
    size_t num_bytes;
    struct scratch *scratch; /* for the crop */
    int is_ours;             /* the scan is decoded by huffman_decoder.c */
};

/* The SHA-256 of the sources, so that the library of older ones is not used with newer Python. */
EXPORTED const char *crop_decoder_sources(void)
{
    return CROP_DECODER_SOURCES;
}

/* The version of the headers. */
EXPORTED const char *crop_decoder_headers(void)
{
    return TEXT(LIBJPEG_TURBO_VERSION);
}

/* An address inside the libjpeg that was loaded, which may be of another version than the headers. 0 if libjpeg is
 * linked statically. */
EXPORTED uintptr_t crop_decoder_libjpeg(void)
{
#ifdef STATIC_LIBJPEG
    return 0;
#else
    return (uintptr_t)jpeg_std_error;
#endif
}

static void leave(j_common_ptr jpeg)
{
    longjmp(((struct decoding *)jpeg->client_data)->leave, 1);
}

static void leave_at_warnings(j_common_ptr jpeg, int level)
{
    if (level < 0)
        leave(jpeg);
}

static void say_nothing(j_common_ptr jpeg)
{
    (void)jpeg;
}

/* Whether a crop of this sampling has the pixels of a full decode. Of others, jpeg_crop_scanline of libjpeg-turbo before
 * 3.0 miscounts the columns (luma 4x2 and 2x4 at 1/2 and 1/4: it leaves some of them unwritten), and crops of one or two
 * columns differ in every version (luma 4x1 with chroma of several kinds). */
static int is_usual_sampling(const struct jpeg_decompress_struct *jpeg)
{
    const jpeg_component_info *all = jpeg->comp_info;
    int is_equal = 1, is_chroma_single = jpeg->num_components == 3;
    for (int component = 1; component < jpeg->num_components; component++) {
        int across = all[component].h_samp_factor, down = all[component].v_samp_factor;
        is_equal &= across == all[0].h_samp_factor && down == all[0].v_samp_factor;
        is_chroma_single &= across == 1 && down == 1;
    }
    int blocks = all[0].h_samp_factor << 4 | all[0].v_samp_factor;
    return is_equal || (is_chroma_single && (blocks == 0x21 || blocks == 0x12 || blocks == 0x22 || blocks == 0x41 ||
                                             blocks == 0x14));
}

/* Only what other versions and modes decode to the same pixels. */
static int is_plain(const struct jpeg_decompress_struct *jpeg)
{
    int is_known = jpeg->jpeg_color_space == JCS_GRAYSCALE || jpeg->jpeg_color_space == JCS_YCbCr ||
                   jpeg->jpeg_color_space == JCS_RGB;
    int is_lossless = !jpeg->progressive_mode && (jpeg->Ss != 0 || jpeg->Se != DCTSIZE2 - 1); /* libjpeg-turbo 3 */
    return is_known && jpeg->data_precision == 8 && !jpeg->arith_code && !is_lossless && is_usual_sampling(jpeg);
}

/* Whether a JPEG may cost more than the default limits of decoding_cost.py allow, which then decides. It counts no less
 * than that does: whatever looks like a marker is one here, and each scan has all components. Of a JPEG of one scan, only
 * the header is looked at. */
static int may_be_costly(const struct decoding *decoding)
{
    const struct jpeg_decompress_struct *jpeg = &decoding->jpeg;
    int is_one_scan = !jpeg_has_multiple_scans((j_decompress_ptr)jpeg);
    const uint8_t *place = decoding->data, *end = is_one_scan ? jpeg->src->next_input_byte : place + decoding->num_bytes;
    uint64_t coefficients = 0, num_scans = 0, num_segments = 0;
    for (int component = 0; component < jpeg->num_components; component++) {
        const jpeg_component_info *info = jpeg->comp_info + component;
        uint64_t across = (uint64_t)info->width_in_blocks + (uint64_t)info->h_samp_factor;
        uint64_t down = (uint64_t)info->height_in_blocks + (uint64_t)info->v_samp_factor;
        coefficients += DCTSIZE2 * across * down;
    }
    while ((place = memchr(place, 0xFF, (size_t)(end - place))) != NULL && ++place < end)
        if (*place > 1 && *place != 0xFF && !(*place >= JPEG_RST0 && *place <= JPEG_RST0 + 7)) {
            num_scans += *place == 0xDA;
            num_segments += *place == JPEG_APP0 + 1 ? EXIF_SEGMENTS : 1;
        }
    if (is_one_scan)
        return num_segments > MOST_SEGMENTS;
    uint64_t pixels = (uint64_t)jpeg->image_height * jpeg->image_width;
    return num_scans > MOST_SCANS || num_segments > MOST_SEGMENTS || num_scans * coefficients > MOST_SCAN_PIXELS ||
           2 * coefficients + 3 * pixels > MOST_MEMORY_BYTES;
}

/* Blocks whose coefficients are not all there are smoothed over their neighbours, which a crop may not have. */
static int is_complete(const struct jpeg_decompress_struct *jpeg)
{
    if (jpeg->progressive_mode)
        for (int component = 0; component < jpeg->num_components; component++)
            for (int k = 0; k < DCTSIZE2; k++)
                if (jpeg->coef_bits[component][k] != 0)
                    return 0;
    return 1;
}

static boolean decode_mcu(j_decompress_ptr jpeg, JBLOCKROW *blocks)
{
    struct decoding *decoding = jpeg->client_data;
    if (!huffman_decode_mcu(decoding->scratch->huffman, blocks))
        leave((j_common_ptr)jpeg);
    return TRUE;
}

/* Has the scan decoded by huffman_decoder.c, if it can and is to. */
static void take_over_scan(struct decoding *decoding, const struct request *request)
{
    struct jpeg_decompress_struct *jpeg = &decoding->jpeg;
    decoding->is_ours = 0;
    if (request->leaves_huffman || jpeg->src->bytes_in_buffer < LEAST_BYTES || jpeg_has_multiple_scans(jpeg))
        return;
    if (!decoding->scratch->huffman)
        decoding->scratch->huffman = new_huffman_decoder();
    decoding->is_ours = decoding->scratch->huffman && huffman_begin(decoding->scratch->huffman, jpeg);
    if (decoding->is_ours)
        jpeg->entropy->decode_mcu = decode_mcu;
}

static void skip_rows(struct jpeg_decompress_struct *jpeg, JDIMENSION count)
{
    if (count > 0 && jpeg_skip_scanlines(jpeg, count) != count)
        leave((j_common_ptr)jpeg);
}

/* Rows of the crop into the scratch, row_bytes apart; *left is where the crop begins in them. */
static size_t read_crop(struct decoding *decoding, const struct request *request, JDIMENSION *left)
{
    struct jpeg_decompress_struct *jpeg = &decoding->jpeg;
    JDIMENSION begin = request->left > MARGIN ? request->left - MARGIN : 0;
    JDIMENSION end = request->left + request->width + MARGIN;
    if (end > jpeg->output_width)
        end = jpeg->output_width;
    JDIMENSION width = end - begin;
    if (width < jpeg->output_width) {
        jpeg_crop_scanline(jpeg, &begin, &width);
        JDIMENSION mcu_width = DCTSIZE / (JDIMENSION)request->denominator;
        if (jpeg->comps_in_scan > 1)
            mcu_width *= (JDIMENSION)jpeg->max_h_samp_factor;
        JDIMENSION end_column = (begin + width + mcu_width - 1) / mcu_width;
        if (decoding->is_ours)
            huffman_want_columns(decoding->scratch->huffman, begin / mcu_width, end_column);
    }
    *left = request->left - begin;
    size_t row_bytes = 3 * (size_t)jpeg->output_width;
    if (!scratch_has(decoding->scratch, row_bytes * (size_t)request->height + READ_BEYOND))
        leave((j_common_ptr)jpeg);
    skip_rows(jpeg, request->top);
    JDIMENSION bottom = request->top + request->height;
    while (jpeg->output_scanline < bottom) {
        JSAMPROW rows[16];
        JDIMENSION count = bottom - jpeg->output_scanline;
        count = count > 16 ? 16 : count;
        for (JDIMENSION i = 0; i < count; i++)
            rows[i] = decoding->scratch->bytes + row_bytes * (jpeg->output_scanline + i - request->top);
        jpeg_read_scanlines(jpeg, rows, count);
    }
    return row_bytes;
}

static int is_restart(const struct jpeg_decompress_struct *jpeg, int marker)
{
    return marker >= JPEG_RST0 && marker <= JPEG_RST0 + 7 && jpeg->restart_interval > 0;
}

/* What libjpeg has not read of the image begins here. */
static void continue_at(struct jpeg_decompress_struct *jpeg, const uint8_t *place)
{
    jpeg->src->bytes_in_buffer -= (size_t)(place - jpeg->src->next_input_byte);
    jpeg->src->next_input_byte = place;
}

/* The rest of the one scan: coded data and restart markers up to the end-of-image marker. */
static int goes_on_to_the_end(struct jpeg_decompress_struct *jpeg)
{
    if (jpeg_input_complete(jpeg) || jpeg->unread_marker == JPEG_EOI)
        return 1;
    if (jpeg->unread_marker != 0 && !is_restart(jpeg, jpeg->unread_marker))
        return 0;
    const uint8_t *place = jpeg->src->next_input_byte, *end = place + jpeg->src->bytes_in_buffer;
    while ((place = memchr(place, 0xFF, (size_t)(end - place))) != NULL && ++place < end) {
        if (*place == JPEG_EOI)
            return 1;
        if (*place != 0 && *place != 0xFF && !is_restart(jpeg, *place))
            return 0;
    }
    return 0;
}

static int resize_crop(const struct request *request, const uint8_t *first, ptrdiff_t row_bytes, uint8_t *out)
{
    struct pixels source = {first, row_bytes, 3, request->height, request->width};
    if (request->is_exchanged)
        source = (struct pixels){first, 3, row_bytes, request->width, request->height};
    if (request->is_upside_down) {
        source.first += (source.height - 1) * source.row_step;
        source.row_step = -source.row_step;
    }
    if (request->is_leftright) {
        source.first += (source.width - 1) * source.column_step;
        source.column_step = -source.column_step;
    }
    return (request->is_antialiased ? resize_antialiased : resize_plain)(&source, &request->target, out);
}

static int decode(struct decoding *decoding, const struct request *request, uint8_t *out)
{
    struct jpeg_decompress_struct *jpeg = &decoding->jpeg;
    int32_t denominator = request->denominator;
    if (denominator != 1 && denominator != 2 && denominator != 4 && denominator != 8)
        return LEFT_TO_OTHERS;
    jpeg_read_header(jpeg, TRUE);
    if (jpeg->image_height != (JDIMENSION)request->stored_height ||
        jpeg->image_width != (JDIMENSION)request->stored_width ||
        (uint64_t)jpeg->image_height * jpeg->image_width > MOST_PIXELS || !is_plain(jpeg) ||
        may_be_costly(decoding))
        return LEFT_TO_OTHERS;
    jpeg->out_color_space = JCS_RGB;
    jpeg->scale_num = 1;
    jpeg->scale_denom = (unsigned)denominator;
    jpeg->dct_method = JDCT_ISLOW;
    jpeg_start_decompress(jpeg);
    int fits = request->top >= 0 && request->left >= 0 && request->height > 0 && request->width > 0 &&
               (JDIMENSION)request->top + (JDIMENSION)request->height <= jpeg->output_height &&
               (JDIMENSION)request->left + (JDIMENSION)request->width <= jpeg->output_width;
    if (!fits || !is_complete(jpeg))
        return LEFT_TO_OTHERS;
    take_over_scan(decoding, request);
    JDIMENSION left;
    size_t row_bytes = read_crop(decoding, request, &left);
    if (decoding->is_ours)
        continue_at(jpeg, huffman_next_marker(decoding->scratch->huffman));
    if (!goes_on_to_the_end(jpeg))
        return LEFT_TO_OTHERS;
    return resize_crop(request, decoding->scratch->bytes + 3 * left, (ptrdiff_t)row_bytes, out) ? DONE : LEFT_TO_OTHERS;
}

/* A function of its own: what it changes after setjmp belongs to its caller, so it is still there after longjmp. */
static int decode_or_leave(struct decoding *decoding, const uint8_t *data, size_t num_bytes,
                           const struct request *request, uint8_t *out)
{
    if (setjmp(decoding->leave) != 0)
        return LEFT_TO_OTHERS;
    jpeg_create_decompress(&decoding->jpeg);
    jpeg_mem_src(&decoding->jpeg, data, num_bytes);
    return decode(decoding, request, out);
}

int decode_view(const uint8_t *data, size_t num_bytes, const struct request *request, struct scratch *scratch,
                uint8_t *out)
{
    struct decoding decoding;
    decoding.data = data, decoding.num_bytes = num_bytes;
    decoding.scratch = scratch;
    decoding.jpeg.err = jpeg_std_error(&decoding.errors);
    decoding.errors.error_exit = leave;
    decoding.errors.emit_message = leave_at_warnings;
    decoding.errors.output_message = say_nothing;
    decoding.jpeg.client_data = &decoding;
    decoding.jpeg.mem = NULL; /* jpeg_destroy looks here if jpeg_create fails */
    int result = decode_or_leave(&decoding, data, num_bytes, request, out);
    jpeg_destroy_decompress(&decoding.jpeg);
    return result;
}

int32_t crop_decoder_view(const uint8_t *data, size_t num_bytes, const struct request *request, uint8_t *out)
{
    struct scratch scratch = {0};
    int result = decode_view(data, num_bytes, request, &scratch, out);
    free_scratch(&scratch);
    return result;
}
