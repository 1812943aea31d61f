// The heads of one token turned by its position. Included by the kernels that turn tokens.

// y = x cos + rotate_half(x) sin for the heads of one token; of a gradient, dx = dy cos - rotate_half(dy sin).
template <bool kGrad, class X, class C>
MINDLORA_INLINE void RotateToken(const X* x, const C* cos, const C* sin, int64_t heads, int64_t half, X* y)
{
    for (int64_t d = 0; d < half; d += kWidth) {
        const int64_t count = half - d;
        const Vec cos_low = LoadUpTo(cos + d, count), cos_high = LoadUpTo(cos + half + d, count);
        const Vec sin_low = LoadUpTo(sin + d, count), sin_high = LoadUpTo(sin + half + d, count);
        const Vec to_low = kGrad ? sin_high : -sin_low, to_high = kGrad ? -sin_low : sin_high;
        for (int64_t head = 0; head < heads; ++head) {
            const int64_t at = head * 2 * half + d;
            const Vec low = LoadUpTo(x + at, count), high = LoadUpTo(x + at + half, count);
            StoreUpTo(low * cos_low + high * to_low, y + at, count);
            StoreUpTo(high * cos_high + low * to_high, y + at + half, count);
        }
    }
}
