/* The Huffman-coded part of a JPEG with one sequential scan: used by crop_decoder.c. */
#ifndef HUFFMAN_DECODER_H
#define HUFFMAN_DECODER_H

#include <stddef.h>
#include <stdio.h>

#include <jpeglib.h>
#include <stdint.h>

struct huffman_decoder;

/* A decoder for any number of images, one after the other. NULL where memory runs out. */
struct huffman_decoder *new_huffman_decoder(void);
void free_huffman_decoder(struct huffman_decoder *decoder);

/* Prepares to decode the scan that jpeg_start_decompress has begun. 0 if it is of another kind, or memory runs out. */
int huffman_begin(struct huffman_decoder *decoder, const struct jpeg_decompress_struct *jpeg);

/* Only the coefficients of the MCUs in these columns are wanted; without this, all are. */
void huffman_want_columns(struct huffman_decoder *decoder, JDIMENSION begin, JDIMENSION end);

/* Decodes the coefficients of the next MCU into its blocks, which hold zeros, in natural order. If `blocks` is NULL,
 * none are wanted. 0 where the data is damaged or unusual; then the decoder is done with this image. */
int huffman_decode_mcu(struct huffman_decoder *decoder, JBLOCKROW *blocks);

/* The first marker after the data that was decoded. One more byte of the image follows it. */
const uint8_t *huffman_next_marker(const struct huffman_decoder *decoder);

#endif
