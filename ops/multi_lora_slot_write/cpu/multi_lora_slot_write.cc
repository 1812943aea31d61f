// multi_lora_slot_write on a CPU: one packed adapter into one slot of the pool, in one copy. See ../README.md.
#include <cstring>

#include "cpu_common/aot.h"

namespace mindlora {
namespace {

constexpr char kOp[] = "multi_lora_slot_write";
enum { kPool, kRanks, kScales, kSlot, kPacked, kScale, kWritten };

void Check(const Shapes& s)
{
    s.CheckSlots(kPool, kRanks, kScales);
    s.CheckRank(kSlot, "slot", 1);
    s.CheckRank(kPacked, "packed", 2);
    s.CheckSame("the size of slot", s.At(kSlot, 0), 1);
    s.CheckSame("K + N", s.At(kPool, 2), s.At(kPacked, 1));
    const int64_t rank = s.At(kPacked, 0), max_rank = s.At(kPool, 1);
    if (rank == 0 || (max_rank >= 0 && rank > max_rank)) {
        Refuse(kOp, "rank is " + std::to_string(rank) + ": the pool takes 1 to " + std::to_string(max_rank) + ".");
    }
}

int64_t BytesOf(const std::string& dtype)
{
    int64_t bytes = 0;
    WithElement(kOp, dtype, [&](auto element) { bytes = sizeof element; });
    return bytes;
}

}  // namespace
}  // namespace mindlora

MINDLORA_EXPORT std::vector<int64_t> MultiLoraSlotWriteInferShape(int* ndims, int64_t** shapes, AotExtra*)
{
    const mindlora::Shapes s(mindlora::kOp, ndims, shapes);
    mindlora::Check(s);
    return s.Of(mindlora::kSlot);
}

MINDLORA_EXPORT int MultiLoraSlotWriteInferType(std::vector<int> types, AotExtra*) { return types[mindlora::kSlot]; }

// The output is the slot that was written: MindSpore has no operator without one.
MINDLORA_EXPORT int MultiLoraSlotWrite(
    int, void** data, int* ndims, int64_t** shapes, const char** dtypes, void*, void*)
{
    using namespace mindlora;
    const Shapes s(kOp, ndims, shapes);
    Check(s);
    CheckDtype(kOp, "packed", dtypes[kPacked], dtypes[kPool]);
    CheckDtype(kOp, "ranks", dtypes[kRanks], "int32");
    CheckDtype(kOp, "scales", dtypes[kScales], "float32");
    CheckDtype(kOp, "slot", dtypes[kSlot], "int32");
    CheckDtype(kOp, "scale", dtypes[kScale], "float32");
    const int32_t slot = *static_cast<const int32_t*>(data[kSlot]);
    if (slot < 0 || slot >= s.At(kPool, 0)) {
        Refuse(kOp, "slot is " + std::to_string(slot) + ": the pool has " + std::to_string(s.At(kPool, 0)) + ".");
    }
    const int64_t row_bytes = s.At(kPool, 2) * BytesOf(dtypes[kPool]), rank = s.At(kPacked, 0);
    std::memcpy(static_cast<char*>(data[kPool]) + slot * s.At(kPool, 1) * row_bytes, data[kPacked], rank * row_bytes);
    static_cast<int32_t*>(data[kRanks])[slot] = static_cast<int32_t>(rank);
    static_cast<float*>(data[kScales])[slot] = *static_cast<const float*>(data[kScale]);
    *static_cast<int32_t*>(data[kWritten]) = slot;
    return 0;
}
