// What newer compilers ask of libc and libstdc++ although it can stand here, so that a library that was built on a
// newer system loads on an older one. Without it glibc must be 2.32 and libstdc++ that of GCC 11. What is hidden binds
// in this library alone.
#include <new>

#define MINDLORA_HIDDEN __attribute__((visibility("hidden")))

extern "C" {
// Reference counts of strings read it: 0 has them count atomically, which is always right.
extern MINDLORA_HIDDEN char __libc_single_threaded;
char __libc_single_threaded = 0;
}

namespace std {
// A vector throws by it where its length overflows; older headers throw bad_alloc there too.
[[noreturn]] MINDLORA_HIDDEN void __throw_bad_array_new_length() { throw bad_alloc(); }
}  // namespace std
