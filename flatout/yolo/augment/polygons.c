/* Boxes of warped polygons, to the bit as boxes_by_numpy in labels.py, but polygon by polygon.

   Compile with -ffp-contract=off, so that sums are rounded as in NumPy. */

#include <math.h>
#include <stdint.h>

enum { RESAMPLED = 1000 };

typedef struct {
    double x, y;
} Point;

typedef struct {
    double low_x, low_y, high_x, high_y;
} Box;

static Point warped(const float *point, const double *m)
{
    const double x = point[0], y = point[1];
    return (Point){m[0] * x + m[1] * y + m[2], m[3] * x + m[4] * y + m[5]};
}

static int is_inside(Point p, double width, double height)
{
    return p.x >= 0 && p.x <= width && p.y >= 0 && p.y <= height;
}

static void take_in(Box *box, Point p)
{
    box->low_x = p.x < box->low_x ? p.x : box->low_x, box->high_x = p.x > box->high_x ? p.x : box->high_x;
    box->low_y = p.y < box->low_y ? p.y : box->low_y, box->high_y = p.y > box->high_y ? p.y : box->high_y;
}

static int both_beyond(Point a, Point b, double width, double height)
{
    return (a.x < 0 && b.x < 0) || (a.x > width && b.x > width) || (a.y < 0 && b.y < 0) ||
           (a.y > height && b.y > height);
}

typedef struct {
    Point begin, end;
    double number, per_sample; /* number of this edge; edges from one sample to the next */
} Edge;

static Point at(const Edge *edge, int64_t sample)
{
    const double share = (double)sample * edge->per_sample - edge->number;
    const Point from = edge->begin, to = edge->end;
    return (Point){from.x + share * (to.x - from.x), from.y + share * (to.y - from.y)};
}

/* Add the points on edge `number` of `num` to the box. x and y are monotonic along it, even when rounded: so the points
   inside are consecutive, and the first and the last of them are enough. */
static void add_edge(Box *box, Point begin, Point end, int64_t number, int64_t num, double width, double height)
{
    if (both_beyond(begin, end, width, height)) return;
    const double per_edge = (double)(RESAMPLED - 1) / (double)num;
    const Edge edge = {begin, end, (double)number, (double)num / (RESAMPLED - 1)};
    int64_t first = (int64_t)ceil((double)number * per_edge);
    int64_t last = (int64_t)fmin((double)(number + 1) * per_edge, RESAMPLED - 1);
    while (first <= last && !is_inside(at(&edge, first), width, height)) first++;
    if (first > last) return;
    while (!is_inside(at(&edge, last), width, height)) last--;
    take_in(box, at(&edge, first));
    take_in(box, at(&edge, last));
}

/* points: float32 x, y of all polygons, one after the other; matrices: float64 [num_polygons, 3, 3], affine;
   boxes: float64 [num_polygons, 4], zeros where no point is right of x = 0 inside the output. */
void polygon_boxes(const float *points, const int64_t *num_points, int64_t num_polygons, const double *matrices,
                   double width, double height, double *boxes)
{
    for (int64_t t = 0; t < num_polygons; t++, matrices += 9, boxes += 4) {
        const int64_t num = num_points[t];
        Box box = {INFINITY, INFINITY, -INFINITY, -INFINITY};
        const Point origin = num ? warped(points, matrices) : (Point){0, 0};
        Point begin = origin;
        for (int64_t number = 0; number < num; number++) {
            const Point end = number + 1 < num ? warped(points + 2 * (number + 1), matrices) : origin;
            add_edge(&box, begin, end, number, num, width, height);
            begin = end;
        }
        const int is_empty = !(box.high_x > 0);
        boxes[0] = is_empty ? 0 : box.low_x, boxes[1] = is_empty ? 0 : box.low_y;
        boxes[2] = is_empty ? 0 : box.high_x, boxes[3] = is_empty ? 0 : box.high_y;
        points += 2 * num;
    }
}
