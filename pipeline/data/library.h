/* What Python calls, and what the functions that fill pixels return. */
#ifndef LIBRARY_H
#define LIBRARY_H

#define EXPORTED __attribute__((visibility("default"))) /* all other functions are hidden (hatch_build.py) */

/* DONE: the pixels are filled. LEFT_TO_OTHERS: the caller's other decoder has to find out what is wrong, if anything. */
enum { LEFT_TO_OTHERS = 0, DONE = 1 };

#endif
