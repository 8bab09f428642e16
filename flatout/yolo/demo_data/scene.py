"""One scene of the demo data set: objects of all classes and sizes on a cluttered background, with boxes and masks.

Dimension key:  H W rows and columns of the image, or of a patch in the functions of shapes and surfaces
                h w rows and columns of the patch that holds an object
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import cv2
import numpy as np

SIDE_PX = (16, 160)
"""Range of both sides of every object's box."""

MIN_CIRCLE_PX = 22
"""Smallest diameter of the circle around a shape; most shapes fill only part of it."""

MAX_COVERED = 0.2
"""Largest fraction of the smaller of two boxes that the other may overlap."""

MAX_OUTSIDE = 0.15
"""Fraction of an object's side that may lie outside of the image."""

OBJECTS = (2, 6)
"""Fewest and most objects, before those without room are left out."""

MAX_TRIES = 20
"""Positions tried for an object before it is left out."""

Box = tuple[int, int, int, int]
"""x1, y1, x2, y2 in pixels; the last pixels are x2 - 1 and y2 - 1."""


class SceneObject(NamedTuple):
    """An object in the image."""

    name: str
    box: Box
    """Around the part of the object that is inside of the image, even where other objects cover it."""
    mask_HW: np.ndarray
    """bool: the pixels of the object, even where other objects cover them."""


class Scene(NamedTuple):
    """A finished image, uint8 [H, W, 3] BGR, and its objects from back to front."""

    image: np.ndarray
    objects: list[SceneObject]


def generate_scene(width: int, height: int, rng: np.random.Generator) -> Scene:
    """Generate the scene that follows from these random numbers."""
    image = generate_background(width, height, rng)
    objects: list[SceneObject] = []
    for _ in range(rng.integers(OBJECTS[0], OBJECTS[1] + 1)):
        name = list(SHAPES)[rng.integers(len(SHAPES))]
        for _ in range(MAX_TRIES):
            patch = make_patch(_choose_outline(name, width, height, rng))
            mask_HW = mask_in(patch, width, height)
            box = bounding_box(mask_HW)
            if _has_allowed_size(box) and _has_room(box, objects):
                paint_patch(image, patch, rng)
                objects.append(SceneObject(name, box, mask_HW))
                break
    return Scene(add_grain(image, rng), objects)


def bounding_box(mask_HW: np.ndarray) -> Box:
    """The smallest box around all pixels of a mask; empty if there are none."""
    columns, rows = np.flatnonzero(mask_HW.any(0)), np.flatnonzero(mask_HW.any(1))
    if not len(columns):
        return 0, 0, 0, 0
    return int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1


def _has_allowed_size(box: Box) -> bool:
    x1, y1, x2, y2 = box
    return all(SIDE_PX[0] <= side <= SIDE_PX[1] for side in (x2 - x1, y2 - y1))


def _has_room(box: Box, objects: Sequence[SceneObject]) -> bool:
    return all(_overlap_fraction(box, other.box) <= MAX_COVERED for other in objects)


def _overlap_fraction(one: Box, other: Box) -> float:
    """Intersection relative to the smaller box: a small object neither lies on a large one nor is hidden by it."""
    (x1, y1, x2, y2), (u1, v1, u2, v2) = one, other
    common = max(0, min(x2, u2) - max(x1, u1)) * max(0, min(y2, v2) - max(y1, v1))
    return common / min((x2 - x1) * (y2 - y1), (u2 - u1) * (v2 - v1))


# Shapes of the six classes, as signed distances.
#
# Every shape fits the unit circle. A distance is negative inside, positive outside, and near the edge it is the
# distance to the edge: so a smooth edge is `0.5 - distance * radius_px`, whatever the size or the rotation.


class Points(NamedTuple):
    """Pixel centres of a patch in the frame of a shape: float32 [H, W] each."""

    x: np.ndarray
    y: np.ndarray

    @property
    def radius(self) -> np.ndarray:
        return np.asarray(np.hypot(self.x, self.y))


RING_WIDTH = 0.36

CROSS_REACH, CROSS_WIDTH = 0.94, 0.34
"""Half the length and half the width of a bar."""

STAR_INNER = 0.48

BOX_SIDE = 0.78
"""Half the side; the rounded corners touch the circle."""

BOX_CORNER = 0.18


def ring(points: Points) -> np.ndarray:
    return np.abs(points.radius - (1 - RING_WIDTH / 2)) - RING_WIDTH / 2


def cross(points: Points) -> np.ndarray:
    x, y = np.abs(points.x), np.abs(points.y)
    horizontal = np.maximum(x - CROSS_REACH, y - CROSS_WIDTH)
    vertical = np.maximum(y - CROSS_REACH, x - CROSS_WIDTH)
    return np.asarray(np.minimum(horizontal, vertical))


def star(points: Points) -> np.ndarray:
    """Five points: the plane is folded into a tenth, where one straight edge is left."""
    x, y = _folded(points, 5)
    tip, notch = (1.0, 0.0), (STAR_INNER * math.cos(math.pi / 5), STAR_INNER * math.sin(math.pi / 5))
    along = (notch[0] - tip[0], notch[1] - tip[1])
    length = math.hypot(*along)
    return ((x - tip[0]) * -along[1] + (y - tip[1]) * along[0]) / -length


def triangle(points: Points) -> np.ndarray:
    """Equilateral: folded into a sixth, where the edge lies at half the radius."""
    x, y = _folded(points, 3)
    return x * math.cos(math.pi / 3) + y * math.sin(math.pi / 3) - 0.5


def ball(points: Points) -> np.ndarray:
    return points.radius - 1


def box(points: Points) -> np.ndarray:
    """A square with rounded corners."""
    x, y = np.abs(points.x) - (BOX_SIDE - BOX_CORNER), np.abs(points.y) - (BOX_SIDE - BOX_CORNER)
    outside = np.hypot(np.maximum(x, 0), np.maximum(y, 0))
    return np.asarray(outside + np.minimum(np.maximum(x, y), 0) - BOX_CORNER)


SHAPES = {shape.__name__: shape for shape in (ring, cross, star, triangle, ball, box)}
"""The classes, in the order of their numbers."""


def _folded(points: Points, corners: int) -> tuple[np.ndarray, np.ndarray]:
    """Mirror every point into the wedge between a corner on the x axis and the middle of the next edge."""
    wedge = 2 * math.pi / corners
    angle = np.arctan2(points.y, points.x)
    angle = np.abs((angle + wedge / 2) % wedge - wedge / 2)
    return points.radius * np.cos(angle), points.radius * np.sin(angle)


# Surfaces of the six classes: a pattern of two colours, a rim, and light from above.
#
# A pattern takes points in the shape's frame and a number of repeats, and returns 0 or 1 (smooth in between): which of
# the two colours a pixel has. Colours are BGR, 0 to 255.

Pattern = Callable[[Points, float], np.ndarray]


class Surface(NamedTuple):
    """How the objects of a class are painted."""

    pattern: Pattern
    repeats: tuple[float, float]
    hues: tuple[tuple[int, int, int], ...]
    """Main colours to choose from. Every class has its own, so that a short training succeeds."""
    relief: float
    """How much the light falls off: 1 for a ball, little for flat objects."""


def spokes(points: Points, repeats: float) -> np.ndarray:
    return _smooth_step(np.sin(np.arctan2(points.y, points.x) * round(repeats)))


def stripes(points: Points, repeats: float) -> np.ndarray:
    return _smooth_step(np.sin(points.y * repeats * math.pi))


def slanted(points: Points, repeats: float) -> np.ndarray:
    return _smooth_step(np.sin((points.x + points.y) * repeats * math.pi))


def checks(points: Points, repeats: float) -> np.ndarray:
    return _smooth_step(np.sin(points.x * repeats * math.pi) * np.sin(points.y * repeats * math.pi))


def dots(points: Points, repeats: float) -> np.ndarray:
    return _smooth_step(np.cos(points.x * repeats * math.pi) * np.cos(points.y * repeats * math.pi) - 0.45)


def concentric(points: Points, repeats: float) -> np.ndarray:
    return _smooth_step(np.sin(points.radius * repeats * math.pi))


RED, CORAL, PINK, VIOLET = (52, 58, 212), (92, 122, 246), (180, 112, 240), (176, 72, 122)

ORANGE, YELLOW, LIME, GREEN = (40, 132, 242), (62, 208, 250), (70, 200, 150), (88, 150, 52)

TEAL, SKY, BLUE, INK = (168, 170, 30), (228, 176, 70), (196, 92, 36), (58, 42, 34)

IVORY = (222, 238, 244)

SURFACES: dict[str, Surface] = {
    "ring": Surface(spokes, (5, 9), (RED, CORAL), 0.35),
    "cross": Surface(slanted, (3.0, 5.0), (GREEN, LIME), 0.2),
    "star": Surface(concentric, (3.0, 4.0), (YELLOW, ORANGE), 0.3),
    "triangle": Surface(dots, (3.0, 4.5), (VIOLET, PINK), 0.2),
    "ball": Surface(stripes, (1.4, 2.4), (BLUE, SKY), 1.0),
    "box": Surface(checks, (2.0, 3.2), (INK, TEAL), 0.25),
}


def paint(name: str, points: Points, distance: np.ndarray, lit: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Colours of a patch, float32 [H, W, 3]; `lit` [H, W] is from -1 (away from the light) to 1 (towards it)."""
    surface = SURFACES[name]
    main = _varied(surface.hues[rng.integers(len(surface.hues))], rng)
    second = _varied(IVORY, rng) if rng.random() < 0.75 else 255 - 0.5 * (255 - main)
    share = surface.pattern(points, rng.uniform(*surface.repeats))[..., None]
    colours = main * share + second * (1 - share)
    # A dark rim of the main colour keeps the outline visible on any background.
    rim = np.clip((distance + 0.13) / 0.04, 0, 1)[..., None]
    colours = colours * (1 - rim) + main * 0.55 * rim
    light = 1 + surface.relief * (0.42 * lit + 0.5 * np.maximum(lit - 0.55, 0) ** 2)
    return np.asarray(np.clip(colours * light[..., None], 0, 255), np.float32)


def _varied(colour: tuple[int, int, int], rng: np.random.Generator) -> np.ndarray:
    """A slightly lighter or darker colour of a slightly different hue; float32 [3]."""
    varied = np.array(colour) * rng.uniform(0.8, 1.15) + rng.normal(0, 9, 3)
    return np.asarray(np.clip(varied, 0, 255), np.float32)


def _smooth_step(wave: np.ndarray) -> np.ndarray:
    return np.clip(wave * 4 + 0.5, 0, 1)


# One object: its outline, and the patch of pixels that holds it.

LIGHT_XY = (-0.57, -0.82)
"""Direction of the light in the image; of length 1."""

SHADOW = 0.4


class Outline(NamedTuple):
    """Position, size and rotation of an object, in pixels of the image."""

    name: str
    centre_xy: tuple[float, float]
    radius_xy: tuple[float, float]
    angle: float


def _choose_outline(name: str, width: int, height: int, rng: np.random.Generator) -> Outline:
    # Sizes are uniform on a logarithmic scale, so that small objects are as frequent as large ones.
    max_circle_px = min(SIDE_PX[1], 0.7 * min(width, height))
    radius = 0.5 * math.exp(rng.uniform(math.log(MIN_CIRCLE_PX), math.log(max_circle_px)))
    stretch = math.exp(rng.uniform(-0.14, 0.14))
    inset = (1 - 2 * MAX_OUTSIDE) * radius
    centre_xy = (rng.uniform(inset, width - inset), rng.uniform(inset, height - inset))
    return Outline(name, centre_xy, (radius * stretch, radius / stretch), rng.uniform(0, 2 * math.pi))


class ObjectPatch(NamedTuple):
    """Geometry of the square around an outline, which may reach beyond the image; it has no colours."""

    outline: Outline
    left: int
    top: int
    points: Points
    """Pixel centres of the patch, in the frame of the shape."""
    distance_hw: np.ndarray
    """Signed distance from the edge in the frame of the shape, where its radius is 1; negative inside."""
    cover_hw: np.ndarray
    """float32: fraction of a pixel that belongs to the object."""


def make_patch(outline: Outline) -> ObjectPatch:
    """The patch around an outline."""
    reach = math.ceil(1.15 * max(outline.radius_xy)) + 2
    left, top = (math.floor(centre) - reach for centre in outline.centre_xy)
    across = np.arange(2 * reach + 1, dtype=np.float32) + 0.5
    dx, dy = left + across - outline.centre_xy[0], (top + across - outline.centre_xy[1])[:, None]
    cos, sin = math.cos(outline.angle), math.sin(outline.angle)
    radius_x, radius_y = outline.radius_xy
    points = Points((dx * cos + dy * sin) / radius_x, (dy * cos - dx * sin) / radius_y)
    distance_hw = SHAPES[outline.name](points)
    cover_hw = np.clip(0.5 - distance_hw * min(outline.radius_xy), 0, 1)
    return ObjectPatch(outline, left, top, points, distance_hw, cover_hw)


def paint_patch(image: np.ndarray, patch: ObjectPatch, rng: np.random.Generator) -> None:
    """Paint the object and its shadow over an image, float32 [H, W, 3], in place."""
    radius = min(patch.outline.radius_xy)
    soft_hw = cv2.GaussianBlur(patch.cover_hw, (0, 0), max(1.0, 0.1 * radius))
    shift = max(1, round(0.1 * radius))
    _blend(image, np.zeros((1, 1, 3), np.float32), SHADOW * soft_hw, patch.left + shift, patch.top + shift)
    colours = paint(patch.outline.name, patch.points, patch.distance_hw, _light_on(patch), rng)
    _blend(image, colours, patch.cover_hw, patch.left, patch.top)


def mask_in(patch: ObjectPatch, width: int, height: int) -> np.ndarray:
    """Pixels of the image of which at least half belongs to the object, bool [H, W]."""
    mask_HW = np.zeros((height, width), bool)
    there, inside = _overlap((patch.top, patch.left), patch.cover_hw.shape, (height, width))
    mask_HW[there] = patch.cover_hw[inside] >= 0.5
    return mask_HW


def _light_on(patch: ObjectPatch) -> np.ndarray:
    """From -1 on the side away from the light to 1 towards it, [h, w]."""
    (centre_x, centre_y), (h, w) = patch.outline.centre_xy, patch.cover_hw.shape
    dx = patch.left + np.arange(w, dtype=np.float32) - centre_x
    dy = patch.top + np.arange(h, dtype=np.float32)[:, None] - centre_y
    return (dx * LIGHT_XY[0] + dy * LIGHT_XY[1]) / max(patch.outline.radius_xy)


def _blend(image: np.ndarray, colours: np.ndarray, cover_hw: np.ndarray, left: int, top: int) -> None:
    there, inside = _overlap((top, left), cover_hw.shape, image.shape[:2])
    over = np.broadcast_to(colours, (*cover_hw.shape, 3))[inside]
    image[there] += (over - image[there]) * cover_hw[inside][..., None]


def _overlap(
    begin_yx: tuple[int, int], patch_hw: tuple[int, ...], image_hw: tuple[int, ...]
) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """The part of a patch inside of the image, as slices of the image and of the patch."""
    there, inside = [], []
    for begin, length, limit in zip(begin_yx, patch_hw, image_hw, strict=True):
        low, high = max(begin, 0), min(begin + length, limit)
        there.append(slice(low, high))
        inside.append(slice(low - begin, high - begin))
    return tuple(there), tuple(inside)


# The background: a gradient between two colours, clouds, unlabelled clutter, sensor noise.
#
# Colours are BGR, 0 to 255; images are float32 [H, W, 3] until `add_grain` finishes them.

PALETTES = (
    ((96, 70, 48), (176, 150, 110)),
    ((70, 92, 60), (160, 186, 150)),
    ((70, 78, 120), (170, 190, 222)),
    ((110, 74, 96), (196, 168, 184)),
    ((58, 58, 62), (150, 152, 158)),
    ((150, 158, 150), (226, 228, 218)),
    ((112, 104, 60), (202, 196, 150)),
    ((44, 66, 104), (120, 160, 206)),
)
"""The two ends of a gradient: muted colours, so that the objects stand out."""

CLOUDS = ((4, 20.0), (9, 10.0), (40, 6.0))
"""Spots across the image, ascending, and how much they brighten or darken it."""


def generate_background(width: int, height: int, rng: np.random.Generator) -> np.ndarray:
    """A cluttered background without objects, float32 [H, W, 3]."""
    image = _cloudy_gradient(width, height, rng)
    for paint_item, (fewest, most), opacity in CLUTTER:
        # OpenCV antialiases 8-bit images only.
        cluttered = np.clip(image, 0, 255).astype(np.uint8)
        for _ in range(rng.integers(fewest, most + 1)):
            paint_item(cluttered, rng.integers(20, 236, 3).tolist(), rng)
        image = cv2.addWeighted(cluttered, opacity, image, 1 - opacity, 0, dtype=cv2.CV_32F)
    return image


def add_grain(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Add sensor noise; returns the finished image, uint8 [H, W, 3]."""
    grain = rng.standard_normal(image.shape[:2], np.float32)[..., None] * rng.uniform(1.5, 6)
    return np.asarray(np.clip(image + grain, 0, 255).astype(np.uint8))


def _cloudy_gradient(width: int, height: int, rng: np.random.Generator) -> np.ndarray:
    """A gradient with soft spots of several sizes, mostly in brightness, a little in colour."""
    background = _gradient(8, 6, rng)
    for cells, strength in CLOUDS:
        rows = max(2, cells * height // width)
        spots = rng.standard_normal((rows, cells, 1)) + 0.4 * rng.standard_normal((rows, cells, 3))
        # From coarse to fine grids: only the last step, to the size of the image, takes time.
        background = cv2.resize(background, (cells, rows), interpolation=cv2.INTER_CUBIC) + strength * spots
    return np.asarray(cv2.resize(background.astype(np.float32), (width, height), interpolation=cv2.INTER_CUBIC))


def _gradient(width: int, height: int, rng: np.random.Generator) -> np.ndarray:
    dark, light = np.array(PALETTES[rng.integers(len(PALETTES))], np.float64)
    angle = rng.uniform(0, 2 * math.pi)
    x, y = np.linspace(-1, 1, width), np.linspace(-1, 1, height)[:, None]
    share = 0.5 + 0.35 * (x * math.cos(angle) + y * math.sin(angle))
    return np.asarray(dark + (light - dark) * share[..., None])


def _band(image: np.ndarray, colour: list[int], rng: np.random.Generator) -> None:
    cv2.line(image, _random_point(image, rng), _random_point(image, rng), colour, int(rng.integers(8, 22)), cv2.LINE_AA)


def _thread(image: np.ndarray, colour: list[int], rng: np.random.Generator) -> None:
    """A thin quadratic Bezier curve, in eighths of pixels."""
    begin, middle, end = (np.array(_random_point(image, rng)) for _ in range(3))
    t = np.linspace(0, 1, 24)[:, None]
    curve = np.round(8 * ((1 - t) ** 2 * begin + 2 * t * (1 - t) * middle + t**2 * end)).astype(np.int32)
    cv2.polylines(image, [curve], False, colour, int(rng.integers(1, 4)), cv2.LINE_AA, 3)


def _speck(image: np.ndarray, colour: list[int], rng: np.random.Generator) -> None:
    axes = rng.integers(2, 7, 2).tolist()
    cv2.ellipse(image, _random_point(image, rng), axes, rng.uniform(0, 180), 0, 360, colour, -1, cv2.LINE_AA)


def _random_point(image: np.ndarray, rng: np.random.Generator) -> tuple[int, int]:
    height, width = image.shape[:2]
    return int(rng.integers(width)), int(rng.integers(height))


CLUTTER = ((_band, (0, 2), 0.3), (_thread, (2, 6), 0.7), (_speck, (4, 14), 0.8))
"""Kind of clutter, fewest and most of it, and its opacity."""
