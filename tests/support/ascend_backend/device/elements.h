// Numbers in memory, by CANN's number of their dtype.
#pragma once

#include <cstddef>

namespace device {

constexpr int kFloat16 = 1, kInt32 = 3, kBFloat16 = 27;

size_t BytesOf(int type);
double Read(const void* element, int type);
void Write(void* element, int type, double value);

}  // namespace device
