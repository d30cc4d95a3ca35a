// Included before every source of a wheel (scripts/wheel). GCC 12 and later name the version 3.4.30 of this function,
// which the libstdc++ of RHEL 9 lacks; the version 3.4.11 does the same.
__asm__(".symver _ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE, "
        "_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE@GLIBCXX_3.4.11");
