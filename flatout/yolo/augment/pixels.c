/* The pixels of a training sample: OpenCV's bytes, in one pass where OpenCV takes several.

   paint      tiles on a canvas -> BGR and an unused byte, scaled and translated (not rotated), bilinear, grey around it
   mix        two painted images -> the first
   recolor    painted image -> hue, saturation, value through tables -> flipped -> three planes, RGB

   Rows are made one at a time, so everything but the images and the result stays in the first-level cache.
   paint_compiled.py compiles this for the CPU it runs on, and compares the results with OpenCV's before using it. Sums
   are written so that they are rounded where OpenCV rounds: compile with -ffp-contract=off. */

#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#if !defined(__FMA__) && !defined(__aarch64__)
#error "without fused multiplication OpenCV is faster"
#endif

enum { GREY = 114, BLOCK = 64, HUES = 180 };

typedef struct {
    const uint8_t *pixels; /* BGR */
    int64_t stride;        /* bytes from row to row */
    int32_t x, y, width, height;
} Tile;

static int32_t nearest(double x)
{
    return x > 2147483647.0 ? INT32_MAX : x < -2147483648.0 ? INT32_MIN : (int32_t)rint(x);
}

static int32_t least(int32_t a, int32_t b) { return a < b ? a : b; }
static int32_t most(int32_t a, int32_t b) { return a > b ? a : b; }
static int32_t clipped(int32_t x, int32_t low, int32_t high) { return least(most(x, low), high); }

/* Row y of the canvas from column first to last, BGR: later tiles over earlier ones, grey where there is none. */
static void compose(const Tile *tiles, int num_tiles, int32_t y, int32_t canvas_w, int32_t canvas_h, int32_t first,
                    int32_t last, uint8_t *row)
{
    memset(row, GREY, 3 * (size_t)(last + 1 - first));
    if (y < 0 || y >= canvas_h) return;
    for (const Tile *tile = tiles; tile < tiles + num_tiles; tile++) {
        if (y < tile->y || y >= tile->y + tile->height) continue;
        const int32_t begin = most(tile->x, most(first, 0));
        const int32_t end = least(tile->x + tile->width, least(last + 1, canvas_w));
        if (begin >= end) continue;
        const uint8_t *from = tile->pixels + (y - tile->y) * tile->stride + 3 * (int64_t)(begin - tile->x);
        memcpy(row + 3 * (begin - first), from, 3 * (size_t)(end - begin));
    }
}

/* One output row from two canvas rows, which are weighted already: pairs of columns are weighted and added. */
static void across(const uint16_t *restrict mixed, const int32_t *restrict left, const int32_t *restrict weight,
                   int32_t width, uint8_t *restrict out)
{
#if defined(__SSE2__)
    const __m128i half = _mm_set1_epi32(512);
    for (int32_t x = 0; x < width; x += 2) {
        __m128i two[2];
        for (int k = 0; k < 2; k++) {
            const uint16_t *from = mixed + left[x + k];
            const __m128i here = _mm_loadl_epi64((const __m128i *)from);
            const __m128i next = _mm_loadl_epi64((const __m128i *)(from + 3));
            const __m128i sum = _mm_madd_epi16(_mm_unpacklo_epi16(here, next), _mm_set1_epi32(weight[x + k]));
            two[k] = _mm_srli_epi32(_mm_add_epi32(sum, half), 10);
        }
        const __m128i words = _mm_packs_epi32(two[0], two[1]);
        _mm_storel_epi64((__m128i *)(out + 4 * x), _mm_packus_epi16(words, words));
    }
#else
    for (int32_t x = 0; x < width; x++)
        for (int c = 0; c < 4; c++) {
            const uint16_t *from = mixed + left[x] + c;
            out[4 * x + c] = (uint8_t)((from[0] * (weight[x] & 63) + from[3] * (weight[x] >> 16) + 512) >> 10);
        }
#endif
}

/* matrix [3, 3]: canvas pixel to output pixel; without rotation and shear, and no scale is 0.
   out: uint8 [height, width, 4]; width is even. scratch: 8 * width + 12 * (canvas_w + 8) bytes. The matrix is inverted
   and coordinates are rounded as in cv::warpAffine of OpenCV 4. */
void paint(const Tile *tiles, int num_tiles, int32_t canvas_w, int32_t canvas_h, const double *matrix, uint8_t *out,
           int32_t width, int32_t height, uint8_t *scratch)
{
    const double shrink = 1 / (matrix[0] * matrix[4]);
    const double step_x = matrix[4] * shrink, step_y = matrix[0] * shrink;
    const double start_x = -step_x * matrix[2], start_y = -step_y * matrix[5];
    int32_t *left = (int32_t *)scratch, *weight = left + width;
    const int32_t start = nearest(start_x * 1024) + 16;
    int32_t first = canvas_w, last = 0;
    for (int32_t x = 0; x < width; x++) {
        const int32_t at = (start + nearest(step_x * x * 1024)) >> 5;
        /* Beyond the canvas everything is grey, however far away. */
        left[x] = clipped(at >> 5, -2, canvas_w);
        weight[x] = (32 - (at & 31)) | (at & 31) << 16;
        first = least(first, left[x]), last = most(last, left[x] + 1);
    }
    for (int32_t x = 0; x < width; x++) left[x] = 3 * (left[x] - first);
    const int32_t values = 3 * (last + 1 - first);
    uint16_t *restrict mixed = (uint16_t *)(weight + width);
    uint8_t *above = (uint8_t *)(mixed + values + 8), *below = above + values;
    int64_t above_y = INT64_MIN, below_y = INT64_MIN;
    for (int32_t y = 0; y < height; y++) {
        const int32_t at = (nearest((step_y * y + start_y) * 1024) + 16) >> 5, top = at >> 5;
        const uint16_t share = at & 31, rest = 32 - share;
        if (top == below_y) {
            uint8_t *free = above;
            above = below, above_y = below_y, below = free, below_y = INT64_MIN;
        }
        if (top != above_y) compose(tiles, num_tiles, top, canvas_w, canvas_h, first, last, above);
        if (top + 1 != below_y) compose(tiles, num_tiles, top + 1, canvas_w, canvas_h, first, last, below);
        above_y = top, below_y = top + 1;
        for (int32_t i = 0; i < values; i++) mixed[i] = above[i] * rest + below[i] * share;
        across(mixed, left, weight, width, out + (int64_t)y * width * 4);
    }
}

/* image * share + other * (1 - share), truncated, into image. */
void mix(uint8_t *restrict image, const uint8_t *restrict other, int64_t num, double share)
{
    const double rest = 1 - share;
    for (int64_t i = 0; i < num; i++) image[i] = (uint8_t)(int32_t)(image[i] * share + other[i] * rest);
}

/* The gain times 2^23 if the table is exactly the multiplication by it, wrapped around (hue) or clipped; else 0. */
static uint32_t factor_of(const uint8_t *table, double gain, int is_hue)
{
    if (!(gain >= 0 && gain < 2)) return 0;
    const uint32_t factor = (uint32_t)(gain * 8388608 + 0.5);
    for (uint32_t x = 0; x < (is_hue ? HUES : 256u); x++) {
        const uint32_t y = x * factor >> 23;
        if (table[x] != (is_hue ? y - (y >= HUES ? HUES : 0) : y < 255 ? y : 255)) return 0;
    }
    return factor;
}

static void look_up(int32_t *value, const uint8_t *table, uint32_t factor)
{
    if (factor)
        for (int i = 0; i < BLOCK; i++) value[i] = least((int32_t)((uint32_t)value[i] * factor >> 23), 255);
    else
        for (int i = 0; i < BLOCK; i++) value[i] = table[value[i]];
}

static void look_up_hue(int32_t *hue, const uint8_t *table, uint32_t factor)
{
    if (factor)
        for (int i = 0; i < BLOCK; i++) {
            const int32_t turned = (int32_t)((uint32_t)hue[i] * factor >> 23);
            hue[i] = turned - (turned >= HUES ? HUES : 0);
        }
    else
        for (int i = 0; i < BLOCK; i++) hue[i] = table[hue[i]];
}

/* OpenCV's 8-bit hue, saturation and value. Masks instead of branches, so that the compiler can vectorize it. */
static void to_hsv(const uint8_t *pixels, int32_t *hue, int32_t *saturation, int32_t *value)
{
    for (int i = 0; i < BLOCK; i++) {
        uint32_t pixel;
        memcpy(&pixel, pixels + 4 * i, 4);
        const int32_t b = pixel & 255, g = pixel >> 8 & 255, r = pixel >> 16 & 255;
        const int32_t high = most(most(b, g), r), span = high - least(least(b, g), r);
        /* Where a divisor is 0, so is the factor of its reciprocal: any other divisor will do. */
        const int32_t by_high = (int32_t)rintf(1044480.0f / (float)(high + (high == 0)));
        const int32_t by_span = (int32_t)rintf(122880.0f / (float)(span + (span == 0)));
        const int32_t red = -(high == r), green = -(high == g) & ~red, blue = ~(red | green);
        const int32_t sixths = (red & (g - b)) | (green & (b - r + 2 * span)) | (blue & (r - g + 4 * span));
        const int32_t turn = (sixths * by_span + 2048) >> 12;
        hue[i] = turn + (HUES & turn >> 31);
        saturation[i] = (span * by_high + 2048) >> 12;
        value[i] = high;
    }
}

static void to_rgb(const int32_t *hue, const int32_t *saturation, const int32_t *value, uint8_t *red, uint8_t *green,
                   uint8_t *blue)
{
    for (int i = 0; i < BLOCK; i++) {
        const float h = (float)hue[i] * (float)(6.0 / HUES), s = (float)saturation[i] * (float)(1 / 255.0);
        const float whole = (float)value[i] * (float)(1 / 255.0);
        const int32_t sector = (int32_t)h;
        const float f = h - (float)sector;
        const int32_t v = (int32_t)(whole * 255), p = (int32_t)(whole * (1 - s) * 255);
        const int32_t q = (int32_t)(whole * fmaf(-s, f, 1) * 255);
        const int32_t t = (int32_t)(whole * fmaf(-s, 1 - f, 1) * 255);
        const int32_t in_0 = -(sector == 0), in_1 = -(sector == 1), in_2 = -(sector == 2);
        const int32_t in_3 = -(sector == 3), in_4 = -(sector == 4), in_5 = -(sector == 5);
        red[i] = (uint8_t)((v & (in_0 | in_5)) | (q & in_1) | (p & (in_2 | in_3)) | (t & in_4));
        green[i] = (uint8_t)((t & in_0) | (v & (in_1 | in_2)) | (q & in_3) | (p & (in_4 | in_5)));
        blue[i] = (uint8_t)((p & (in_0 | in_1)) | (t & in_2) | (v & (in_3 | in_4)) | (q & in_5));
    }
}

static void reverse(uint8_t *values)
{
    for (int i = 0; i < BLOCK / 2; i++) {
        const uint8_t kept = values[i];
        values[i] = values[BLOCK - 1 - i], values[BLOCK - 1 - i] = kept;
    }
}

/* image: uint8 [height, width, 4]; width is a multiple of 64. tables: uint8 [3, 256], the new value of each value;
   where a table is a multiplication by its gain [3], it is computed instead of looked up.
   out: uint8 [3, height, width], RGB. */
void recolor(const uint8_t *image, int32_t width, int32_t height, const double *gain, const uint8_t *tables,
             int up_down, int left_right, uint8_t *out)
{
    const uint32_t by_h = factor_of(tables, gain[0], 1), by_s = factor_of(tables + 256, gain[1], 0),
                   by_v = factor_of(tables + 512, gain[2], 0);
    const int64_t plane = (int64_t)width * height;
    int32_t hue[BLOCK], saturation[BLOCK], value[BLOCK];
    uint8_t rgb[3][BLOCK];
    for (int32_t y = 0; y < height; y++) {
        uint8_t *row = out + (int64_t)(up_down ? height - 1 - y : y) * width;
        for (int32_t x = 0; x < width; x += BLOCK) {
            to_hsv(image + ((int64_t)y * width + x) * 4, hue, saturation, value);
            look_up_hue(hue, tables, by_h);
            look_up(saturation, tables + 256, by_s);
            look_up(value, tables + 512, by_v);
            to_rgb(hue, saturation, value, rgb[0], rgb[1], rgb[2]);
            for (int c = 0; c < 3; c++) {
                if (left_right) reverse(rgb[c]);
                memcpy(row + c * plane + (left_right ? width - BLOCK - x : x), rgb[c], BLOCK);
            }
        }
    }
}
