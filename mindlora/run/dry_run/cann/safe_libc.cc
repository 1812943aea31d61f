// libc_sec.so: the C library's functions with the size of the destination, which is never exceeded.
#include <cstdarg>
#include <cstdio>
#include <cstring>

namespace {
constexpr int kTooLong = 34;  // ERANGE
}

extern "C" {

int memcpy_s(void* destination, size_t size, const void* source, size_t count)
{
    if (count > size) return kTooLong;
    std::memcpy(destination, source, count);
    return 0;
}

int memmove_s(void* destination, size_t size, const void* source, size_t count)
{
    if (count > size) return kTooLong;
    std::memmove(destination, source, count);
    return 0;
}

int memset_s(void* destination, size_t size, int value, size_t count)
{
    if (count > size) return kTooLong;
    std::memset(destination, value, count);
    return 0;
}

int strncpy_s(char* destination, size_t size, const char* source, size_t count)
{
    const size_t length = strnlen(source, count);
    if (length >= size) return kTooLong;
    std::memcpy(destination, source, length);
    destination[length] = '\0';
    return 0;
}

int strcpy_s(char* destination, size_t size, const char* source)
{
    return strncpy_s(destination, size, source, std::strlen(source));
}

int strcat_s(char* destination, size_t size, const char* source)
{
    const size_t length = strnlen(destination, size);
    return strcpy_s(destination + length, size - length, source);
}

int vsnprintf_s(char* destination, size_t size, size_t, const char* format, va_list values)
{
    return std::vsnprintf(destination, size, format, values);
}

int snprintf_s(char* destination, size_t size, size_t count, const char* format, ...)
{
    va_list values;
    va_start(values, format);
    const int length = vsnprintf_s(destination, size, count, format, values);
    va_end(values);
    return length;
}

int sprintf_s(char* destination, size_t size, const char* format, ...)
{
    va_list values;
    va_start(values, format);
    const int length = std::vsnprintf(destination, size, format, values);
    va_end(values);
    return length;
}
}
