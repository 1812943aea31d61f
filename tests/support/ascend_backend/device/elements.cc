#include "elements.h"

#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

template <class Stored>
double ReadAs(const void* element)
{
    Stored stored;
    std::memcpy(&stored, element, sizeof(stored));
    return static_cast<double>(stored);
}

template <class Stored>
void WriteAs(void* element, double value)
{
    const Stored stored = static_cast<Stored>(value);
    std::memcpy(element, &stored, sizeof(stored));
}

// The upper half of a float; rounding is to nearest, ties to even.
double ReadBFloat16(const void* element)
{
    uint16_t half;
    std::memcpy(&half, element, sizeof(half));
    const uint32_t bits = static_cast<uint32_t>(half) << 16;
    return ReadAs<float>(&bits);
}

void WriteBFloat16(void* element, double value)
{
    const float rounded = static_cast<float>(value);
    uint32_t bits;
    std::memcpy(&bits, &rounded, sizeof(bits));
    const uint16_t half = std::isnan(rounded) ? 0x7fc0 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    std::memcpy(element, &half, sizeof(half));
}

struct Element {
    size_t bytes;
    double (*read)(const void*);
    void (*write)(void*, double);
};

template <class Stored>
constexpr Element Plain()
{
    return {sizeof(Stored), ReadAs<Stored>, WriteAs<Stored>};
}

// Booleans are any byte that is not 0.
void WriteBool(void* element, double value) { WriteAs<uint8_t>(element, value != 0); }

const Element& ElementOf(int type)
{
    static const Element none = {1, [](const void*) { return 0.0; }, [](void*, double) {}};
    static const Element known[] = {Plain<float>(), Plain<_Float16>(), Plain<int8_t>(), Plain<int32_t>(),
        Plain<uint8_t>(), none, Plain<int16_t>(), Plain<uint16_t>(), Plain<uint32_t>(), Plain<int64_t>(),
        Plain<uint64_t>(), Plain<double>(), {1, ReadAs<uint8_t>, WriteBool}};
    static const Element bfloat16 = {2, ReadBFloat16, WriteBFloat16};
    if (type == device::kBFloat16) return bfloat16;
    return type >= 0 && type < static_cast<int>(sizeof(known) / sizeof(known[0])) ? known[type] : none;
}

}  // namespace

size_t device::BytesOf(int type) { return ElementOf(type).bytes; }
double device::Read(const void* element, int type) { return ElementOf(type).read(element); }
void device::Write(void* element, int type, double value) { ElementOf(type).write(element, value); }
