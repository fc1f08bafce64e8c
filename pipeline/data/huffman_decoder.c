/* Huffman codes -> DCT coefficients (ITU-T T.81, F.2.2), in place of libjpeg-turbo's own decoder.
 *
 * Decoding is one chain: look up the next code, drop its bits, look up the next one. Three things make it short:
 * - The coded bytes are copied first, without the zeros that are stuffed behind 0xFF. Filling the bit buffer then needs
 *   no branch.
 * - One lookup of 10 bits gives two coefficients with their values, if both fit into 10 bits.
 * - Coefficients outside of the crop are skipped, up to three a lookup.
 *
 * What is damaged or unusual is left to the caller.
 */
#include "huffman_decoder.h"

#include <stdlib.h>
#include <string.h>

#define ALWAYS_INLINE static inline __attribute__((always_inline))

enum { LOOKUP_BITS = 10, NUM_ENTRIES = 1 << LOOKUP_BITS, MOST_CODE_BITS = 16 };
enum { FILLED_BITS = 56 };       /* `fill` leaves at least as many in the bit buffer */
enum { MOST_SKIPPED_BITS = 28 }; /* of one lookup: two fit into the bit buffer */
enum { NUM_COEFFICIENTS = DCTSIZE2 };
enum { END_RUN = 127 }; /* an end of block counts as a run of zeros, longer than all others of a lookup together */
enum { PADDING = 288 }; /* bytes behind the coded ones: for 64 codes of 16 + 15 bits, and what `fill` reads */
_Static_assert(2 * MOST_SKIPPED_BITS <= FILLED_BITS && MOST_SKIPPED_BITS < 32, "two skips a fill, in 5 bits");
_Static_assert(END_RUN > NUM_COEFFICIENTS + 3 * 16, "no runs add up to an end of block");
_Static_assert(PADDING >= NUM_COEFFICIENTS * 31 / 8 + 2 * 8, "a block is decoded before its end is checked");

/* The next 10 bits look up `singles`, `pairs` and `skips`; DC tables have only the first. */
struct huffman_table {
    uint16_t singles[NUM_ENTRIES]; /* a code: its symbol in bits 0 to 7, its length above; 0: a longer one */
    uint32_t limits[MOST_CODE_BITS + 1]; /* by length: no code up to this length begins with these 16 bits or more */
    int32_t offsets[MOST_CODE_BITS + 1]; /* by length: from a code to the place of its symbol */
    const uint8_t *symbols;
    uint64_t pairs[NUM_ENTRIES]; /* one or two coefficients, see first_of_pair; 0: not even one fits into 10 bits */
    uint16_t skips[NUM_ENTRIES]; /* up to three codes: their bits in bits 0 to 4, their places above; 0: none */
};

struct huffman_decoder {
    uint8_t *bytes; /* the coded bytes up to the next marker, without stuffing, then PADDING zeros */
    size_t num_bytes;
    const uint8_t *next, *end;        /* of `bytes` */
    const uint8_t *marker, *data_end; /* of the image */
    uint64_t buffer;                  /* the next bits, the first one on top */
    int count;                        /* of the bits in the buffer */
    uint32_t last_dc[MAX_COMPS_IN_SCAN];
    JDIMENSION column, num_columns, begin_column, end_column; /* of MCUs */
    unsigned restart_interval, mcus_to_restart, next_restart;
    int num_blocks; /* in an MCU */
    int components[D_MAX_BLOCKS_IN_MCU];
    const struct huffman_table *dc[D_MAX_BLOCKS_IN_MCU], *ac[D_MAX_BLOCKS_IN_MCU];
    struct huffman_table dc_tables[NUM_HUFF_TBLS], ac_tables[NUM_HUFF_TBLS];
};

struct huffman_decoder *new_huffman_decoder(void)
{
    return calloc(1, sizeof(struct huffman_decoder));
}

void free_huffman_decoder(struct huffman_decoder *decoder)
{
    if (decoder)
        free(decoder->bytes);
    free(decoder);
}

/* What an entry of `singles` says: the length of the code, the number of bits behind it that are the coefficient's
 * value, and how many zeros come before the coefficient. */
ALWAYS_INLINE int length_of(int single)
{
    return single >> 8;
}

ALWAYS_INLINE int size_of(int single)
{
    return single & 15;
}

ALWAYS_INLINE int run_of(int single)
{
    int run = single >> 4 & 15;
    return size_of(single) == 0 && run != 15 ? END_RUN : run;
}

/* The signed number in the first `size` bits (F.2.2.1, EXTEND). */
ALWAYS_INLINE int32_t value_of(uint64_t bits, int size)
{
    uint64_t sign = 0 - (~bits >> 63);
    return (int32_t)(((bits ^ sign) >> 1 >> (63 - size) ^ sign) - sign);
}

/* A pair, from its lowest byte: the number of its bits; the first coefficient's run; the step from its place to the
 * second's; 1 if there is a second; both values, 16 bits each. It is the sum of two parts. */
static uint64_t first_of_pair(int single, uint64_t bits)
{
    int length = length_of(single), size = size_of(single);
    return (uint64_t)(length + size) | (uint64_t)run_of(single) << 8 | 1u << 16 |
           (uint64_t)(uint16_t)value_of(bits << length, size) << 32;
}

static uint64_t second_of_pair(int single, uint64_t bits)
{
    int length = length_of(single), size = size_of(single);
    return (uint64_t)(length + size) | (uint64_t)run_of(single) << 16 | 1u << 24 |
           (uint64_t)(uint16_t)value_of(bits << length, size) << 48;
}

static void fill_singles(struct huffman_table *table, const JHUFF_TBL *codes)
{
    int32_t code = 0, place = 0, filled = 0;
    table->symbols = codes->huffval;
    for (int length = 1; length <= MOST_CODE_BITS; length++, code <<= 1) {
        table->offsets[length] = place - code;
        for (int i = 0; i < codes->bits[length]; i++, code++, place++)
            if (length <= LOOKUP_BITS)
                for (int32_t end = filled + (NUM_ENTRIES >> length); filled < end; filled++)
                    table->singles[filled] = (uint16_t)(length << 8 | codes->huffval[place]);
        table->limits[length] = (uint32_t)code << (MOST_CODE_BITS - length);
    }
    memset(table->singles + filled, 0, sizeof(uint16_t) * (size_t)(NUM_ENTRIES - filled));
}

static void fill_pairs(struct huffman_table *table)
{
    uint64_t seconds[NUM_ENTRIES];
    for (uint32_t i = 0; i < NUM_ENTRIES; i++) {
        uint64_t bits = (uint64_t)i << (64 - LOOKUP_BITS);
        int single = table->singles[i], total = length_of(single) + size_of(single);
        int is_inside = single != 0 && total <= LOOKUP_BITS;
        table->pairs[i] = is_inside ? first_of_pair(single, bits) : 0;
        seconds[i] = is_inside ? second_of_pair(single, bits) : LOOKUP_BITS + 1;
    }
    for (uint32_t i = 0; i < NUM_ENTRIES; i++) {
        uint32_t total = table->pairs[i] & 255;
        uint64_t second = seconds[i << total & (NUM_ENTRIES - 1)];
        int ends_block = (table->pairs[i] >> 8 & 255) == END_RUN;
        if (table->pairs[i] != 0 && !ends_block && total + (second & 255) <= LOOKUP_BITS)
            table->pairs[i] += second;
    }
}

static void fill_skips(struct huffman_table *table)
{
    for (uint32_t i = 0; i < NUM_ENTRIES; i++) {
        int total = 0, advance = 0;
        for (int k = 0; k < 3 && total < LOOKUP_BITS && advance < END_RUN; k++) {
            int single = table->singles[i << total & (NUM_ENTRIES - 1)], length = length_of(single);
            int with_it = total + length + size_of(single);
            if (single == 0 || total + length > LOOKUP_BITS || with_it > MOST_SKIPPED_BITS)
                break;
            total = with_it, advance += run_of(single) + 1;
        }
        table->skips[i] = (uint16_t)(advance << 5 | total);
    }
}

/* Copies the coded bytes up to the next marker. 0 if there is none. */
static int begin_segment(struct huffman_decoder *decoder, const uint8_t *from)
{
    uint8_t *to = decoder->bytes;
    for (;;) {
        const uint8_t *found = memchr(from, 0xFF, (size_t)(decoder->data_end - from));
        if (!found || decoder->data_end - found < 2)
            return 0;
        memcpy(to, from, (size_t)(found - from));
        to += found - from;
        from = found + 2;
        if (found[1] != 0) {
            decoder->marker = found;
            break;
        }
        *to++ = 0xFF;
    }
    memset(to, 0, PADDING);
    decoder->next = decoder->bytes, decoder->end = to;
    decoder->buffer = 0, decoder->count = 0;
    memset(decoder->last_dc, 0, sizeof decoder->last_dc);
    decoder->mcus_to_restart = decoder->restart_interval;
    return 1;
}

int huffman_begin(struct huffman_decoder *decoder, const struct jpeg_decompress_struct *jpeg)
{
    if (jpeg->progressive_mode || jpeg->arith_code || jpeg->comps_in_scan != jpeg->num_components || jpeg->Ss != 0 ||
        jpeg->Se != NUM_COEFFICIENTS - 1)
        return 0;
    size_t num_bytes = jpeg->src->bytes_in_buffer + PADDING;
    if (decoder->num_bytes < num_bytes) {
        free(decoder->bytes);
        decoder->bytes = malloc(num_bytes);
        decoder->num_bytes = decoder->bytes ? num_bytes : 0;
    }
    decoder->data_end = jpeg->src->next_input_byte + jpeg->src->bytes_in_buffer;
    decoder->restart_interval = jpeg->restart_interval;
    decoder->next_restart = 0;
    if (!decoder->bytes || !begin_segment(decoder, jpeg->src->next_input_byte))
        return 0;
    decoder->column = 0, decoder->num_columns = jpeg->MCUs_per_row;
    huffman_want_columns(decoder, 0, jpeg->MCUs_per_row);
    int has_dc[NUM_HUFF_TBLS] = {0}, has_ac[NUM_HUFF_TBLS] = {0};
    decoder->num_blocks = jpeg->blocks_in_MCU;
    for (int i = 0; i < decoder->num_blocks; i++) {
        const jpeg_component_info *component = jpeg->cur_comp_info[jpeg->MCU_membership[i]];
        int dc = component->dc_tbl_no, ac = component->ac_tbl_no; /* libjpeg-turbo has checked the tables */
        if (!has_dc[dc])
            fill_singles(decoder->dc_tables + dc, jpeg->dc_huff_tbl_ptrs[dc]);
        if (!has_ac[ac]) {
            fill_singles(decoder->ac_tables + ac, jpeg->ac_huff_tbl_ptrs[ac]);
            fill_pairs(decoder->ac_tables + ac);
            fill_skips(decoder->ac_tables + ac);
        }
        has_dc[dc] = has_ac[ac] = 1;
        decoder->components[i] = jpeg->MCU_membership[i];
        decoder->dc[i] = decoder->dc_tables + dc, decoder->ac[i] = decoder->ac_tables + ac;
    }
    return 1;
}

void huffman_want_columns(struct huffman_decoder *decoder, JDIMENSION begin, JDIMENSION end)
{
    decoder->begin_column = begin, decoder->end_column = end;
}

const uint8_t *huffman_next_marker(const struct huffman_decoder *decoder)
{
    return decoder->marker;
}

/* The state of reading, in registers. */
struct bits {
    uint64_t buffer;
    int count;
    const uint8_t *next;
};

/* Adds whole bytes. Some bits of the byte behind them get into the buffer as well; they are not counted, and added
 * again the next time. */
ALWAYS_INLINE void fill(struct bits *bits)
{
    uint64_t bytes = 0;
    for (int i = 0; i < 8; i++)
        bytes = bytes << 8 | bits->next[i];
    bits->buffer |= bytes >> bits->count;
    bits->next += (63 - bits->count) >> 3;
    bits->count |= FILLED_BITS;
}

ALWAYS_INLINE uint32_t top(const struct bits *bits)
{
    return (uint32_t)(bits->buffer >> (64 - LOOKUP_BITS));
}

ALWAYS_INLINE void drop(struct bits *bits, int count)
{
    bits->buffer <<= count;
    bits->count -= count;
}

/* 0: there is no such code. */
static int long_single(const struct huffman_table *table, uint64_t buffer)
{
    uint32_t first = (uint32_t)(buffer >> (64 - MOST_CODE_BITS));
    for (int length = LOOKUP_BITS + 1; length <= MOST_CODE_BITS; length++)
        if (first < table->limits[length])
            return length << 8 | table->symbols[(int32_t)(first >> (MOST_CODE_BITS - length)) + table->offsets[length]];
    return 0;
}

ALWAYS_INLINE int next_single(const struct huffman_table *table, const struct bits *bits)
{
    int single = table->singles[top(bits)];
    return single != 0 ? single : long_single(table, bits->buffer);
}

enum { NUM_PLACES = NUM_COEFFICIENTS + 2 * (END_RUN + 1) };

/* From the zigzag order to the natural one. The zeros of an end of block go to the last place, which nothing has been
 * written to by then. */
static const uint8_t NATURAL[NUM_PLACES] = {
    0,  1,  8,  16, 9,  2,  3,  10, 17, 24, 32, 25, 18, 11, 4,  5,  12, 19, 26, 33, 40, 48,
    41, 34, 27, 20, 13, 6,  7,  14, 21, 28, 35, 42, 49, 56, 57, 50, 43, 36, 29, 22, 15, 23,
    30, 37, 44, 51, 58, 59, 52, 45, 38, 31, 39, 46, 53, 60, 61, 54, 47, 55, 62, 63,
    [NUM_COEFFICIENTS ... NUM_PLACES - 1] = 63};

/* Whether a block may end with this as its next place: after its last coefficient, or by an end of block before it. */
ALWAYS_INLINE int is_end(int place)
{
    return place == NUM_COEFFICIENTS || (place > END_RUN + 1 && place <= END_RUN + NUM_COEFFICIENTS);
}

/* Decodes one code of any length and what is behind it, and advances *place. 0 if there is no such code. */
ALWAYS_INLINE int decode_single(struct bits *bits, const struct huffman_table *table, JCOEF *block, int *place)
{
    fill(bits);
    int single = next_single(table, bits), length = length_of(single), size = size_of(single);
    if (block)
        block[NATURAL[*place + run_of(single)]] = (JCOEF)value_of(bits->buffer << length, size);
    *place += run_of(single) + 1;
    drop(bits, length + size);
    return single != 0;
}

/* The AC coefficients of a block. 0 where a code is unknown or a run leads beyond the block. */
ALWAYS_INLINE int decode_ac(struct bits *bits, const struct huffman_table *table, JCOEF *block)
{
    for (int place = 1;;) {
        fill(bits);
        for (int room = FILLED_BITS; room >= LOOKUP_BITS; room -= LOOKUP_BITS) {
            uint64_t pair = table->pairs[top(bits)];
            int first = place + (int)(pair >> 8 & 255), second = first + (int)(pair >> 16 & 255);
            int next = second + (int)(pair >> 24 & 255);
            if (pair == 0 || (next >= NUM_COEFFICIENTS && !is_end(next))) { /* it may be the next block's */
                if (!decode_single(bits, table, block, &place))
                    return 0;
                if (place >= NUM_COEFFICIENTS)
                    return is_end(place);
                break;
            }
            block[NATURAL[second]] = (JCOEF)(pair >> 48); /* before the first: its zero may go to that one's place */
            block[NATURAL[first]] = (JCOEF)(pair >> 32);
            drop(bits, (int)(pair & 255));
            if (next >= NUM_COEFFICIENTS)
                return 1;
            place = next;
        }
    }
}

/* decode_ac without the coefficients. */
ALWAYS_INLINE int skip_ac(struct bits *bits, const struct huffman_table *table)
{
    for (int place = 1;;) {
        fill(bits);
        for (int room = FILLED_BITS; room >= MOST_SKIPPED_BITS; room -= MOST_SKIPPED_BITS) {
            int skip = table->skips[top(bits)], next = place + (skip >> 5);
            if (skip == 0 || (next >= NUM_COEFFICIENTS && !is_end(next))) {
                if (!decode_single(bits, table, NULL, &place))
                    return 0;
                if (place >= NUM_COEFFICIENTS)
                    return is_end(place);
                break;
            }
            drop(bits, skip & 31);
            if (next >= NUM_COEFFICIENTS)
                return 1;
            place = next;
        }
    }
}

/* After the bits that pad the last byte, the restart marker whose turn it is must follow. */
static int restart(struct huffman_decoder *decoder)
{
    int is_at_end = decoder->next - decoder->count / 8 == decoder->end;
    if (!is_at_end || decoder->marker[1] != JPEG_RST0 + decoder->next_restart)
        return 0;
    decoder->next_restart = (decoder->next_restart + 1) % 8;
    return begin_segment(decoder, decoder->marker + 2);
}

int huffman_decode_mcu(struct huffman_decoder *decoder, JBLOCKROW *blocks)
{
    if (decoder->restart_interval > 0) {
        if (decoder->mcus_to_restart == 0 && !restart(decoder))
            return 0;
        decoder->mcus_to_restart--;
    }
    int is_wanted = blocks && decoder->column >= decoder->begin_column && decoder->column < decoder->end_column;
    decoder->column = decoder->column + 1 == decoder->num_columns ? 0 : decoder->column + 1;
    struct bits bits = {decoder->buffer, decoder->count, decoder->next};
    int is_right = 1;
    for (int i = 0; i < decoder->num_blocks && is_right; i++) {
        fill(&bits);
        int single = next_single(decoder->dc[i], &bits), length = length_of(single), size = size_of(single);
        uint32_t *dc = decoder->last_dc + decoder->components[i];
        *dc += (uint32_t)value_of(bits.buffer << length, size);
        drop(&bits, length + size);
        if (is_wanted) {
            (*blocks[i])[0] = (JCOEF)*dc;
            is_right = decode_ac(&bits, decoder->ac[i], *blocks[i]);
        } else
            is_right = skip_ac(&bits, decoder->ac[i]);
        is_right &= single != 0 && bits.next - bits.count / 8 <= decoder->end; /* not in the padding */
    }
    decoder->buffer = bits.buffer, decoder->count = bits.count, decoder->next = bits.next;
    return is_right;
}
