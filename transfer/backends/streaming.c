/* Copies that leave the caches alone, called through ctypes (transfer/backends/copying.py). */

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <emmintrin.h>

/* How far ahead the source is fetched, and where a page of the target is met for the first time. Shared memory comes in
 * small pages, and a store cannot wait for its page's address aside, as a prefetch can. Neither ever faults. */
enum { AHEAD = 1024, SMALL_PAGE = 4096, PAGES_AHEAD = 2 };

/* Stores that go past the caches need not read first what they overwrite, which an ordinary copy of memory that is in
 * no cache does: a third of its traffic. All is visible to other processors on return. */
void headrace_copy(char *to, const char *from, int64_t bytes)
{
    int64_t head = -(uintptr_t)to & 15;
    if (head > bytes)
        head = bytes;
    memcpy(to, from, head);
    int64_t at = head;
    for (; at + 64 <= bytes; at += 64) {
        _mm_prefetch(from + at + AHEAD, _MM_HINT_NTA);
        if (((uintptr_t)(to + at) & (SMALL_PAGE - 1)) < 64)
            _mm_prefetch(to + at + PAGES_AHEAD * SMALL_PAGE, _MM_HINT_NTA);
        __m128i a = _mm_loadu_si128((const __m128i *)(from + at));
        __m128i b = _mm_loadu_si128((const __m128i *)(from + at + 16));
        __m128i c = _mm_loadu_si128((const __m128i *)(from + at + 32));
        __m128i d = _mm_loadu_si128((const __m128i *)(from + at + 48));
        _mm_stream_si128((__m128i *)(to + at), a);
        _mm_stream_si128((__m128i *)(to + at + 16), b);
        _mm_stream_si128((__m128i *)(to + at + 32), c);
        _mm_stream_si128((__m128i *)(to + at + 48), d);
    }
    memcpy(to + at, from + at, bytes - at);
    _mm_sfence();
}
#else
void headrace_copy(char *to, const char *from, int64_t bytes) { memcpy(to, from, bytes); }
#endif

/* Row from_rows[i] of a table of rows of this many bytes goes to row to_rows[i] of another one. */
void headrace_copy_rows(char *to, const int32_t *to_rows, const char *from, const int32_t *from_rows, int64_t rows,
                        int64_t bytes)
{
    for (int64_t i = 0; i < rows; i++)
        headrace_copy(to + to_rows[i] * bytes, from + from_rows[i] * bytes, bytes);
}
